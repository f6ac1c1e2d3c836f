#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <cstddef>
#include <cstdint>
#include <deque>
#include <stdexcept>
#include <vector>

#include "bind.hpp"
#include "block_copier.hpp"
#include "thread_pool.hpp"

namespace nb = nanobind;

namespace kvtiers {
namespace {

// A Python object's contiguous bytes, held until the copy is over.
class View {
  public:
    explicit View(nb::handle object) {
        if (PyObject_GetBuffer(object.ptr(), &buffer_, PyBUF_SIMPLE) != 0) throw nb::python_error();
    }
    ~View() { PyBuffer_Release(&buffer_); }
    View(const View &) = delete;
    View &operator=(const View &) = delete;
    const void *data() const { return buffer_.buf; }
    std::size_t nbytes() const { return static_cast<std::size_t>(buffer_.len); }

  private:
    Py_buffer buffer_;
};

struct Piece {
    void *target;
    const void *source;
    std::size_t nbytes;
};

// Copies the bytes of Python objects, such as views of a mapping, to addresses.
class PieceCopier {
  public:
    explicit PieceCopier(int num_threads)
        : stream_from_nbytes_(last_level_cache_nbytes() / 2), pool_(num_threads - 1) {
        if (num_threads < 1) throw std::invalid_argument("num_threads is not positive");
    }

    void copy(const std::vector<std::uintptr_t> &targets, const nb::list &sources, Method method) {
        if (targets.size() != sources.size())
            throw std::invalid_argument("targets and sources differ in number");
        std::deque<View> views;  // outlives the unlocked part
        std::vector<Piece> pieces;
        std::size_t nbytes = 0;
        for (std::size_t i = 0; i < targets.size(); ++i) {
            const View &view = views.emplace_back(sources[i]);
            pieces.push_back(
                {reinterpret_cast<void *>(targets[i]), view.data(), view.nbytes()});
            nbytes += view.nbytes();
        }
        const CopyFunction function = copy_function(
            method != Method::automatic     ? method
            : static_cast<std::int64_t>(nbytes) >= stream_from_nbytes_ ? best_streaming_method()
                                            : Method::memcpy);
        if (function == nullptr) throw std::invalid_argument("this CPU has no such method");
        const nb::gil_scoped_release release;
        const auto work = [&](std::int64_t i) {
            const Piece &piece = pieces[static_cast<std::size_t>(i)];
            function(piece.target, piece.source, piece.nbytes);
            streaming_fence();
        };
        const auto count = static_cast<std::int64_t>(pieces.size());
        if (count > 1)
            pool_.get().run(count, work);
        else if (count == 1)
            work(0);
    }

  private:
    std::int64_t stream_from_nbytes_;
    PoolHandle pool_;
};

}  // namespace

void bind_pieces(nb::module_ &module) {
    nb::class_<PieceCopier>(module, "PieceCopier",
                            "Copies bytes of Python objects to raw addresses, on threads of its own.")
        .def(nb::init<int>(), nb::arg("num_threads"))
        .def("copy", &PieceCopier::copy, nb::arg("targets"), nb::arg("sources"),
             nb::arg("method") = Method::automatic,
             "Copy each source's bytes to the address beside it; one contiguous buffer each.\n\n"
             "Returns when done, GIL released. The caller vouches for the addresses.");
}

}  // namespace kvtiers
