#include "block_copier.hpp"

#include <algorithm>
#include <string>

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

}  // namespace

struct BlockCopier::Batch {
    Direction direction;
    const Plan *plan;
    const std::int64_t *block_ids;
    const std::int64_t *slots;
    CopyFunction large;  // for pieces of kMinStreamedPiece and more
    CopyFunction small;
};

BlockCopier::BlockCopier(const std::vector<Memory> &allocations, const std::vector<Group> &groups,
                         SlabShape slab, Tuning tuning)
    : slab_(slab),
      tuning_(tuning),
      pool_(std::max(0, tuning.num_threads - 1)) {
    check_slab(slab);
    if (tuning.num_threads < 1)
        refuse("num_threads " + std::to_string(tuning.num_threads) + " is not positive");
    if (tuning_.stream_from_nbytes < 0) {
        const std::int64_t cache = last_level_cache_nbytes();
        tuning_.stream_from_nbytes = (cache > 0 ? cache : kDefaultCache) / 2;
    }
    for (const Group &group : groups) plans_.push_back(plan_of(group, allocations, slab));
}

void BlockCopier::copy(Direction direction, std::int64_t group,
                       const std::vector<std::int64_t> &block_ids,
                       const std::vector<std::int64_t> &slots, Method method, int max_threads) {
    const Plan &plan = plan_at(plans_, group);
    check_rows(direction, plan, slab_, block_ids, slots);
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
