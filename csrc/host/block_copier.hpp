// Copies payloads between engine blocks and slots of the slab; knows nothing of Python.
#pragma once

#include <cstdint>
#include <vector>

#include "block_plan.hpp"
#include "stream_copy.hpp"
#include "thread_pool.hpp"

namespace kvtiers {

struct Tuning {
    int num_threads;                 // the caller's thread included
    std::int64_t stream_from_nbytes;  // batches from here on pass by the cache; < 0: by the L3
    std::int64_t thread_from_nbytes;  // batches from here on use the pool
};

class BlockCopier {
  public:
    // Throws std::invalid_argument if a run leaves its allocation for any valid block id,
    // or a payload its slot.
    BlockCopier(const std::vector<Memory> &allocations, const std::vector<Group> &groups,
                SlabShape slab, Tuning tuning);

    // Copies a batch; row i pairs block_ids[i] with slots[i].
    // Throws std::invalid_argument, with the row, before the first byte moves.
    void copy(Direction direction, std::int64_t group, const std::vector<std::int64_t> &block_ids,
              const std::vector<std::int64_t> &slots, Method method, int max_threads);

    const Tuning &tuning() const { return tuning_; }

  private:
    struct Batch;

    void copy_span(const Batch &batch, std::int64_t begin, std::int64_t end) const;

    SlabShape slab_;
    Tuning tuning_;
    std::vector<Plan> plans_;
    PoolHandle pool_;
};

// Bytes of the last-level cache that the system reports for CPU 0; 0 if it does not say.
std::int64_t last_level_cache_nbytes();

}  // namespace kvtiers
