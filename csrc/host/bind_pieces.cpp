#include <nanobind/nanobind.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
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
    // A negative bound means half of the last level cache.
    PieceCopier(int num_threads, std::int64_t stream_from_nbytes)
        : stream_from_nbytes_(stream_from_nbytes >= 0 ? stream_from_nbytes
                                                      : last_level_cache_nbytes() / 2),
          num_threads_(static_cast<std::size_t>(num_threads)),
          pool_(num_threads - 1) {
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
        const auto copy_range = [&](std::size_t begin, std::size_t end) {
            for (std::size_t i = begin; i < end; ++i)
                function(pieces[i].target, pieces[i].source, pieces[i].nbytes);
            streaming_fence();
        };
        // A few ranges a thread: pieces are of very different sizes, and a fence costs a little.
        const std::size_t ranges = std::min(pieces.size(), num_threads_ * std::size_t{8});
        if (num_threads_ == 1 || ranges < 2) return copy_range(0, pieces.size());
        pool_.get().run(static_cast<std::int64_t>(ranges), [&](std::int64_t i) {
            const auto at = static_cast<std::size_t>(i);
            copy_range(pieces.size() * at / ranges, pieces.size() * (at + 1) / ranges);
        });
    }

  private:
    std::int64_t stream_from_nbytes_;
    std::size_t num_threads_;
    PoolHandle pool_;
};

}  // namespace

void bind_pieces(nb::module_ &module) {
    nb::class_<PieceCopier>(module, "PieceCopier",
                            "Copies bytes of Python objects to raw addresses, on threads of its own.")
        .def(nb::init<int, std::int64_t>(), nb::arg("num_threads"),
             nb::arg("stream_from_nbytes") = -1)
        .def("copy", &PieceCopier::copy, nb::arg("targets"), nb::arg("sources"),
             nb::arg("method") = Method::automatic,
             "Copy each source's bytes to the address beside it; one contiguous buffer each.\n\n"
             "Returns when done, GIL released. The caller vouches for the addresses.");
}

}  // namespace kvtiers
