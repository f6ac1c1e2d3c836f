// Copies payloads between engine blocks and slots of the slab; knows nothing of Python.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "stream_copy.hpp"
#include "thread_pool.hpp"

namespace kvtiers {

enum class Direction { gather, scatter };

struct Memory {
    std::uintptr_t address;
    std::int64_t nbytes;
};

// Block b has the bytes [offset + b * block_stride, ... + nbytes) of an allocation.
struct Run {
    std::int64_t allocation, offset, block_stride, nbytes;
};

struct Group {
    std::vector<Run> runs;  // in payload order
    std::int64_t num_blocks;
    std::int64_t header_nbytes;  // the payload starts behind it
};

struct SlabShape {
    std::uintptr_t address;
    std::int64_t num_slots;
    std::int64_t slot_nbytes;
};

struct Tuning {
    int num_threads;                 // the caller's thread included
    std::int64_t stream_from_nbytes;  // batches from here on pass by the cache; < 0: by the L3
    std::int64_t thread_from_nbytes;  // batches from here on use the pool
};

class BlockCopier {
  public:
    // Throws std::invalid_argument if a run leaves its allocation for any valid block id,
    // or a payload its slot.
    BlockCopier(std::vector<Memory> allocations, std::vector<Group> groups, SlabShape slab,
                Tuning tuning);

    // Copies a batch; row i pairs block_ids[i] with slots[i].
    // Throws std::invalid_argument, with the row, before the first byte moves.
    void copy(Direction direction, std::int64_t group, const std::vector<std::int64_t> &block_ids,
              const std::vector<std::int64_t> &slots, Method method, int max_threads);

    const Tuning &tuning() const { return tuning_; }

  private:
    struct Piece {
        std::uintptr_t base;  // of block 0, in the allocation
        std::int64_t block_stride;
        std::int64_t nbytes;
        std::int64_t payload_offset;
    };
    struct Plan {
        std::vector<Piece> pieces;
        std::int64_t num_blocks;
        std::int64_t header_nbytes;
        std::int64_t payload_nbytes;
    };
    struct Batch;

    Plan plan_of(const Group &group) const;
    void check(Direction direction, const Plan &plan, const std::vector<std::int64_t> &block_ids,
               const std::vector<std::int64_t> &slots) const;
    void copy_span(const Batch &batch, std::int64_t begin, std::int64_t end) const;

    std::vector<Memory> allocations_;
    SlabShape slab_;
    Tuning tuning_;
    std::vector<Plan> plans_;
    PoolHandle pool_;
};

// Bytes of the last-level cache that the system reports for CPU 0; 0 if it does not say.
std::int64_t last_level_cache_nbytes();

}  // namespace kvtiers
