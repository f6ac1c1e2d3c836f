#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <cstdint>
#include <stdexcept>
#include <vector>

#include "bind.hpp"
#include "block_copier.hpp"
#include "thread_pool.hpp"

namespace nb = nanobind;

namespace kvtiers {
namespace {

using PieceTable =
    nb::ndarray<const std::int64_t, nb::shape<-1, 3>, nb::c_contig, nb::device::cpu>;

struct Piece {
    void *target;
    const void *source;
    std::size_t nbytes;
};

// Copies pieces of memory that are named by their addresses: out of a mapping, into slots.
class PieceCopier {
  public:
    explicit PieceCopier(int num_threads)
        : stream_from_nbytes_(last_level_cache_nbytes() / 2), pool_(num_threads - 1) {
        if (num_threads < 1) throw std::invalid_argument("num_threads is not positive");
    }

    void copy(const PieceTable &table, Method method) {
        std::vector<Piece> pieces;
        std::int64_t nbytes = 0;
        const std::int64_t *row = table.data();
        for (std::size_t i = 0; i < table.shape(0); ++i, row += 3) {
            if (row[2] < 0) throw std::invalid_argument("a piece has a negative size");
            pieces.push_back({reinterpret_cast<void *>(row[0]),
                              reinterpret_cast<const void *>(row[1]),
                              static_cast<std::size_t>(row[2])});
            nbytes += row[2];
        }
        const CopyFunction function = copy_function(
            method != Method::automatic     ? method
            : nbytes >= stream_from_nbytes_ ? best_streaming_method()
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
                            "Copies pieces of memory between raw addresses, on threads of its own.")
        .def(nb::init<int>(), nb::arg("num_threads"))
        .def("copy", &PieceCopier::copy, nb::arg("pieces").noconvert(),
             nb::arg("method") = Method::automatic,
             "Copy each row of an int64 [N, 3] table of target, source and bytes.\n\n"
             "Returns when done, GIL released. The caller vouches for the addresses.");
}

}  // namespace kvtiers
