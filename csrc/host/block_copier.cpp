#include "block_copier.hpp"

#include <algorithm>
#include <stdexcept>
#include <utility>

namespace kvtiers {
namespace {

// Below this a streaming store's start-up costs more than the cache (0.77 of memcpy at 512 B).
constexpr std::int64_t kMinStreamedPiece = 4096;
// One thread fills the bus with pieces of this size, so that a second one pays for its wake-up
// only in batches twice as large (Zen 5, 2 cores: 0.94 at 4 MiB, 1.0 to 1.2 at 8; 2026-11-29).
constexpr std::int64_t kLargePiece = 64 << 10;
// Small enough to even out threads of unequal speed, large enough to hide one atomic addition.
constexpr std::int64_t kMinChunk = 256 << 10;
constexpr std::int64_t kMaxChunk = 2 << 20;
constexpr std::int64_t kPage = 4096;
// Where the system names no cache: a middling server's.
constexpr std::int64_t kDefaultCache = 32 << 20;

std::string range_of(std::int64_t count) { return "0.." + std::to_string(count - 1); }

[[noreturn]] void refuse(const std::string &message) { throw std::invalid_argument(message); }

void check_ids(const char *noun, const std::vector<std::int64_t> &ids, std::int64_t count) {
    for (std::size_t row = 0; row < ids.size(); ++row)
        if (ids[row] < 0 || ids[row] >= count)
            refuse("row " + std::to_string(row) + ": " + noun + " " + std::to_string(ids[row]) +
                   " is not in " + range_of(count));
}

// Ids must be in range already. One bit per id: 128 KiB for a million of them.
void check_distinct(const char *noun, const std::vector<std::int64_t> &ids, std::int64_t count) {
    std::vector<std::uint64_t> seen(static_cast<std::size_t>(count) / 64 + 1);
    for (std::size_t row = 0; row < ids.size(); ++row) {
        const auto id = static_cast<std::uint64_t>(ids[row]);
        const std::uint64_t bit = std::uint64_t{1} << (id % 64);
        if (seen[id / 64] & bit) {
            const auto first = std::find(ids.begin(), ids.end(), ids[row]) - ids.begin();
            refuse("row " + std::to_string(row) + ": " + noun + " " + std::to_string(ids[row]) +
                   " is already the target of row " + std::to_string(first));
        }
        seen[id / 64] |= bit;
    }
}

std::int64_t checked_product(std::int64_t a, std::int64_t b, const char *what) {
    std::int64_t product;
    if (__builtin_mul_overflow(a, b, &product)) refuse(std::string(what) + " overflows 64 bits");
    return product;
}

std::int64_t checked_sum(std::int64_t a, std::int64_t b, const char *what) {
    std::int64_t sum;
    if (__builtin_add_overflow(a, b, &sum)) refuse(std::string(what) + " overflows 64 bits");
    return sum;
}

}  // namespace

struct BlockCopier::Batch {
    Direction direction;
    const Plan *plan;
    const std::int64_t *block_ids;
    const std::int64_t *slots;
    CopyFunction large;  // for pieces of kMinStreamedPiece and more
    CopyFunction small;
};

BlockCopier::BlockCopier(std::vector<Memory> allocations, std::vector<Group> groups,
                         SlabShape slab, Tuning tuning)
    : allocations_(std::move(allocations)),
      slab_(slab),
      tuning_(tuning),
      pool_(std::max(0, tuning.num_threads - 1)) {
    if (slab.num_slots < 1 || slab.slot_nbytes < 1)
        refuse("slab of " + std::to_string(slab.num_slots) + " slots of " +
               std::to_string(slab.slot_nbytes) + " bytes");
    checked_product(slab.num_slots, slab.slot_nbytes, "the slab's size");
    if (tuning.num_threads < 1)
        refuse("num_threads " + std::to_string(tuning.num_threads) + " is not positive");
    if (tuning_.stream_from_nbytes < 0) {
        const std::int64_t cache = last_level_cache_nbytes();
        tuning_.stream_from_nbytes = (cache > 0 ? cache : kDefaultCache) / 2;
    }
    for (const Group &group : groups) plans_.push_back(plan_of(group));
}

BlockCopier::Plan BlockCopier::plan_of(const Group &group) const {
    Plan plan{{}, group.num_blocks, group.header_nbytes, 0};
    if (group.num_blocks < 1 || group.header_nbytes < 0)
        refuse(std::to_string(group.num_blocks) + " blocks, a header of " +
               std::to_string(group.header_nbytes) + " bytes");
    for (const Run &run : group.runs) {
        const auto count = static_cast<std::int64_t>(allocations_.size());
        if (run.allocation < 0 || run.allocation >= count)
            refuse("allocation " + std::to_string(run.allocation) + " is not in " +
                   range_of(count));
        const Memory &memory = allocations_[static_cast<std::size_t>(run.allocation)];
        if (run.offset < 0 || run.block_stride < 0 || run.nbytes < 1)
            refuse("run at offset " + std::to_string(run.offset) + ", stride " +
                   std::to_string(run.block_stride) + ", " + std::to_string(run.nbytes) +
                   " bytes");
        const std::int64_t last =
            checked_product(group.num_blocks - 1, run.block_stride, "a block's offset");
        const std::int64_t end = checked_sum(
            checked_sum(run.offset, last, "a block's offset"), run.nbytes, "a run's end");
        if (end > memory.nbytes)
            refuse("run at offset " + std::to_string(run.offset) + " ends at " +
                   std::to_string(end) + ", beyond the allocation's " +
                   std::to_string(memory.nbytes) + " bytes");
        plan.pieces.push_back({memory.address + static_cast<std::uintptr_t>(run.offset),
                               run.block_stride, run.nbytes, plan.payload_nbytes});
        plan.payload_nbytes = checked_sum(plan.payload_nbytes, run.nbytes, "the payload");
    }
    if (plan.payload_nbytes > slab_.slot_nbytes - plan.header_nbytes)
        refuse("header and payload of " + std::to_string(plan.header_nbytes) + " + " +
               std::to_string(plan.payload_nbytes) + " bytes exceed the slot's " +
               std::to_string(slab_.slot_nbytes));
    return plan;
}

void BlockCopier::check(Direction direction, const Plan &plan,
                        const std::vector<std::int64_t> &block_ids,
                        const std::vector<std::int64_t> &slots) const {
    if (block_ids.size() != slots.size())
        refuse(std::to_string(block_ids.size()) + " block ids but " +
               std::to_string(slots.size()) + " slots");
    check_ids("block id", block_ids, plan.num_blocks);
    check_ids("slot", slots, slab_.num_slots);
    // Two writes to one target would race, and one of the rows would hold the other's bytes.
    if (direction == Direction::gather)
        check_distinct("slot", slots, slab_.num_slots);
    else
        check_distinct("block id", block_ids, plan.num_blocks);
}

void BlockCopier::copy(Direction direction, std::int64_t group,
                       const std::vector<std::int64_t> &block_ids,
                       const std::vector<std::int64_t> &slots, Method method, int max_threads) {
    if (group < 0 || group >= static_cast<std::int64_t>(plans_.size()))
        refuse("KV group " + std::to_string(group) + " is not in " +
               range_of(static_cast<std::int64_t>(plans_.size())));
    const Plan &plan = plans_[static_cast<std::size_t>(group)];
    check(direction, plan, block_ids, slots);
    const std::int64_t total = static_cast<std::int64_t>(block_ids.size()) * plan.payload_nbytes;
    if (total == 0) return;
    if (method == Method::automatic)
        method = total >= tuning_.stream_from_nbytes ? best_streaming_method() : Method::memcpy;
    const CopyFunction large = copy_function(method);
    if (large == nullptr)
        refuse("copy method " + std::to_string(static_cast<int>(method)) +
               " is not available on this CPU");
    const Batch batch{direction, &plan, block_ids.data(), slots.data(), large,
                      copy_function(Method::memcpy)};
    const int threads = max_threads > 0 ? std::min(max_threads, tuning_.num_threads)
                                        : tuning_.num_threads;
    const auto pieces = static_cast<std::int64_t>(plan.pieces.size());
    const bool large_pieces = plan.payload_nbytes / pieces >= kLargePiece;
    if (threads == 1 || total / (large_pieces ? 2 : 1) < tuning_.thread_from_nbytes) {
        copy_span(batch, 0, total);
        return;
    }
    // Whole pages, so that pieces are cut where the target is aligned as well as it can be.
    const std::int64_t fair = total / (8 * threads) / kPage * kPage;
    const std::int64_t chunk = std::clamp(fair, kMinChunk, kMaxChunk);
    pool_.get().run((total + chunk - 1) / chunk, [&](std::int64_t i) {
        copy_span(batch, i * chunk, std::min(total, (i + 1) * chunk));
    });
}

// Copies the bytes [begin, end) of the batch's payloads laid one after another.
void BlockCopier::copy_span(const Batch &batch, std::int64_t begin, std::int64_t end) const {
    const std::vector<Piece> &pieces = batch.plan->pieces;
    const std::int64_t payload = batch.plan->payload_nbytes;
    std::int64_t row = begin / payload;
    std::int64_t within = begin % payload;
    auto piece = std::prev(std::upper_bound(
        pieces.begin(), pieces.end(), within,
        [](std::int64_t at, const Piece &p) { return at < p.payload_offset; }));
    std::int64_t left = end - begin;
    while (left > 0) {
        const std::int64_t block = batch.block_ids[row];
        const std::uintptr_t slot =
            slab_.address +
            static_cast<std::uintptr_t>(batch.slots[row] * slab_.slot_nbytes +
                                        batch.plan->header_nbytes);
        for (; piece != pieces.end() && left > 0; ++piece) {
            const std::int64_t skip = within - piece->payload_offset;
            const std::int64_t nbytes = std::min(piece->nbytes - skip, left);
            auto *in_block = reinterpret_cast<void *>(
                piece->base + static_cast<std::uintptr_t>(block * piece->block_stride + skip));
            auto *in_slot = reinterpret_cast<void *>(slot + static_cast<std::uintptr_t>(within));
            const CopyFunction one = nbytes >= kMinStreamedPiece ? batch.large : batch.small;
            if (batch.direction == Direction::gather)
                one(in_slot, in_block, static_cast<std::size_t>(nbytes));
            else
                one(in_block, in_slot, static_cast<std::size_t>(nbytes));
            within += nbytes;
            left -= nbytes;
        }
        piece = pieces.begin();
        within = 0;
        ++row;
    }
    streaming_fence();
}

}  // namespace kvtiers
