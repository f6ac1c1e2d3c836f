#include "bind.hpp"
#include "bind_types.hpp"
#include "block_copier.hpp"

namespace nb = nanobind;

namespace kvtiers {
namespace {

void construct(BlockCopier *self, const std::vector<MemoryArguments> &allocations,
               const std::vector<GroupArguments> &groups, const MemoryArguments &slab,
               std::int64_t slot_nbytes, int num_threads, std::int64_t stream_from_nbytes,
               std::int64_t thread_from_nbytes) {
    new (self) BlockCopier(memories_of(allocations), groups_of(groups),
                           {slab.first, slab.second, slot_nbytes},
                           {num_threads, stream_from_nbytes, thread_from_nbytes});
}

template <Direction direction>
void copy(BlockCopier &self, std::int64_t group, const Int64s &block_ids, const Int64s &slots,
          Method method, int max_threads) {
    const auto blocks = column_of(block_ids);
    const auto places = column_of(slots);
    const nb::gil_scoped_release release;
    self.copy(direction, group, blocks, places, method, max_threads);
}

template <Direction direction>
void bind_direction(nb::class_<BlockCopier> &type, const char *name, const char *doc) {
    type.def(name, &copy<direction>, nb::arg("group"), nb::arg("block_ids").noconvert(),
             nb::arg("slots").noconvert(), nb::arg("method") = Method::automatic,
             nb::arg("max_threads") = 0, doc);
}

}  // namespace

void bind_copier(nb::module_ &module) {
    nb::enum_<Method>(module, "Method", "How one contiguous piece is copied.")
        .value("AUTO", Method::automatic, "By the size of batch and piece.")
        .value("MEMCPY", Method::memcpy, "Through the cache.")
        .value("SSE2", Method::sse2, "Streaming stores of 16 bytes.")
        .value("AVX2", Method::avx2, "Streaming stores of 32 bytes.");
    nb::class_<BlockCopier> type(
        module, "HostCopier",
        "Copies payloads between engine blocks and slots.\n\n"
        "allocations: (address, bytes) of each. groups: (runs int64 [R, 4] of allocation, offset,\n"
        "block stride and bytes; number of blocks; header bytes). slab: (address, number of\n"
        "slots). stream_from_nbytes: batches from here on pass by the cache, -1 for half of the\n"
        "last-level cache. thread_from_nbytes: batches from here on use the threads.\n"
        "The memory is the caller's and must outlive the copier.\n"
        "Raises ValueError where a run leaves its allocation, or a payload its slot.");
    type.def("__init__", &construct, nb::arg("allocations"), nb::arg("groups"), nb::arg("slab"),
             nb::arg("slot_nbytes"), nb::arg("num_threads"), nb::arg("stream_from_nbytes") = -1,
             nb::arg("thread_from_nbytes") = std::int64_t{4} << 20);
    bind_direction<Direction::gather>(
        type, "gather",
        "Copy blocks to slots; int64 columns of equal length. Returns when done, GIL released.\n"
        "max_threads: 0 for all. Raises ValueError with the row before the first byte moves.");
    bind_direction<Direction::scatter>(type, "scatter", "Copy slots to blocks; see `gather`.");
    type.def_prop_ro("stream_from_nbytes",
                     [](const BlockCopier &self) { return self.tuning().stream_from_nbytes; });
}

}  // namespace kvtiers
