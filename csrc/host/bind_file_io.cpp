#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/unique_ptr.h>
#include <nanobind/stl/vector.h>

#include <cerrno>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "bind.hpp"
#include "file_io.hpp"

namespace nb = nanobind;

namespace kvtiers {
namespace {

template <int columns>
using Table =
    nb::ndarray<const std::int64_t, nb::shape<-1, columns>, nb::c_contig, nb::device::cpu>;

// Copies both tables first: nobody can change an address after it was checked.
std::unique_ptr<IoBatch> batch_of(std::int64_t id, bool writes, const Table<3> &ops,
                                  const Table<2> &pieces) {
    auto batch = std::make_unique<IoBatch>();
    batch->id = id;
    const std::int64_t *piece = pieces.data();
    std::int64_t left = static_cast<std::int64_t>(pieces.shape(0));
    const std::int64_t *row = ops.data();
    for (std::size_t i = 0; i < ops.shape(0); ++i, row += 3) {
        if (row[1] < 0 || row[2] < 1 || row[2] > left)
            throw std::invalid_argument("an operation's offset or pieces are out of range");
        IoOp op{static_cast<int>(row[0]), writes, row[1], {}, 0};
        for (std::int64_t k = 0; k < row[2]; ++k, piece += 2) {
            op.pieces.push_back(
                {reinterpret_cast<void *>(piece[0]), static_cast<std::size_t>(piece[1])});
            op.nbytes += piece[1];
        }
        left -= row[2];
        batch->ops.push_back(std::move(op));
    }
    batch->num_pending = batch->ops.size();
    for (IoOp &op : batch->ops) op.batch = batch.get();
    return batch;
}

void submit(FileIo &self, std::int64_t id, bool writes, const Table<3> &ops,
            const Table<2> &pieces) {
    // With the GIL: it is a matter of microseconds, and another thread that computes would keep
    // the GIL for its whole switch interval of 5 ms.
    self.submit(batch_of(id, writes, ops, pieces));
}

std::vector<std::pair<std::int64_t, std::vector<std::int64_t>>> poll(FileIo &self) {
    std::vector<std::pair<std::int64_t, std::vector<std::int64_t>>> answers;
    for (const auto &batch : self.poll()) {
        std::vector<std::int64_t> results;
        for (const IoOp &op : batch->ops) results.push_back(op.result);
        answers.emplace_back(batch->id, std::move(results));
    }
    return answers;
}

std::unique_ptr<FileIo> make_threads(int num_threads) {
    return std::make_unique<ThreadedFileIo>(num_threads);
}

std::unique_ptr<FileIo> make_uring(unsigned depth) {
    try {
        return make_uring_io(depth);
    } catch (const std::system_error &error) {
        errno = error.code().value();
        PyErr_SetFromErrno(PyExc_OSError);
        throw nb::python_error();
    }
}

}  // namespace

void bind_file_io(nb::module_ &module) {
    nb::class_<FileIo>(module, "FileIo",
                       "Positioned vectored file I/O, without the GIL. The memory is the caller's\n"
                       "and must stay until the batch has been polled.")
        .def("submit", &submit, nb::arg("batch_id"), nb::arg("writes"),
             nb::arg("ops").noconvert(), nb::arg("pieces").noconvert(),
             "Submit a batch. ops: int64 [N, 3] of descriptor, offset and number of pieces;\n"
             "pieces: int64 [M, 2] of address and bytes. Raises ValueError with none begun.")
        .def("poll", &poll,
             "Return (batch id, results) of finished batches; a result is the bytes moved or\n"
             "-errno. Fewer bytes than asked for: the file ended.")
        .def("close", &FileIo::close, nb::call_guard<nb::gil_scoped_release>(),
             "Wait for what was submitted and end all threads; idempotent.");
    module.def("threaded_file_io", &make_threads, nb::arg("num_threads"),
               "Return an engine of blocking calls on threads of its own.");
    module.def("uring_file_io", &make_uring, nb::arg("depth"),
               "Return an io_uring engine. Raises OSError where the system does not allow it.");
}

}  // namespace kvtiers
