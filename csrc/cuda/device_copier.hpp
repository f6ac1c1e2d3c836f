// Copies payloads between engine blocks on a CUDA device and page-locked slots; no Python.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <vector>

#include "../host/block_plan.hpp"
#include "block_index.h"
#include "driver.hpp"

namespace kvtiers::cuda {

enum class Route {
    dma,     // one copy by the device's copy engines for every piece
    direct,  // a kernel reads and writes the slots
    staged,  // a kernel to or from a buffer of the device, one copy for every payload
};

struct DeviceTuning {
    int num_thread_blocks;         // of a kernel: about as many SMs are busy with it
    std::int64_t staging_nbytes;   // a direction
    std::int64_t tile_nbytes;      // that a warp copies at a time
    int num_markers;               // that keep an event of their own
};

constexpr std::size_t kMaxCopies = 16384;  // of one driver call
constexpr std::int64_t kStagingAlignment = 256;

inline std::int64_t round_up(std::int64_t nbytes, std::int64_t multiple) {
    return (nbytes + multiple - 1) / multiple * multiple;
}

// Each direction has two streams: one for the copy engines, one for kernels. Batches of one
// direction keep their order; a batch is over when the event behind its last piece is. `submit`,
// `done`, `wait` and `close` belong to one thread, `mark` and `hold` may be called from another.
class DeviceCopier {
  public:
    // kernels: the fatbin, empty where there is none: then every route is dma.
    // Throws std::invalid_argument as `plan_of`; Error where the driver refuses.
    DeviceCopier(std::shared_ptr<const Driver> driver, int device,
                 const std::vector<Memory> &allocations, const std::vector<Group> &groups,
                 SlabShape slab, const std::string &kernels, DeviceTuning tuning);
    ~DeviceCopier();
    DeviceCopier(const DeviceCopier &) = delete;
    DeviceCopier &operator=(const DeviceCopier &) = delete;

    // Records a point of a stream of the engine; handle 0 is the legacy stream.
    // Throws Error, also while that stream is captured: a graph cannot hold the point.
    std::int64_t mark(std::uintptr_t stream);

    // Queues a batch behind a marker, 0 for none; returns its ticket, from 1 on.
    // Throws std::invalid_argument, with the row, before the first byte moves;
    // std::out_of_range for a marker never issued;
    // Error if the driver refuses: what was queued is over then.
    std::int64_t submit(Direction direction, std::int64_t group,
                        const std::vector<std::int64_t> &block_ids,
                        const std::vector<std::int64_t> &slots, std::int64_t after, Route route);

    // Returns what a batch that is over took on the device, from the moment its marker was reached,
    // in seconds; nothing while it runs. Being over consumes it, as Error does: it has failed.
    // Throws std::out_of_range if it is not pending.
    std::optional<double> done(std::int64_t ticket);

    // Lets what is queued on a stream of the engine from now on wait for a batch.
    // Returns false where it cannot, since that stream is captured: a graph cannot hold the wait.
    // Throws std::out_of_range for a ticket never issued; Error.
    bool hold(std::int64_t ticket, std::uintptr_t stream);

    // Blocks until a batch is over, consumed or not.
    void wait(std::int64_t ticket);

    // Waits for what is queued and releases everything; idempotent.
    // Returns what failed while it waited, empty if nothing did.
    std::string close();

    bool has_kernels() const { return module_ != nullptr; }

  private:
    static constexpr std::size_t kBuffers = 4;  // of a direction's staging
    struct Lane {
        Stream copies = nullptr;
        Stream kernels = nullptr;
        Address staging = 0;
        std::size_t next = 0;                // buffer
        Event filled[kBuffers] = {};         // by the kernel, or by the copy engines
        Event emptied[kBuffers] = {};
        Stream last = nullptr;               // it finished the batch before
        Route route = Route::dma;            // of that batch
        Event turn = nullptr;                // the end of that batch, where the route changes
    };
    struct Layout {
        Plan plan;
        Address pieces = 0;  // kernel::Piece, on the device
        std::int64_t tiles_per_block = 0;
    };
    struct Span {  // the two ends of a batch on the device
        Event begun = nullptr, over = nullptr;
    };
    struct Rows {  // part of a batch
        const std::int64_t *block_ids, *slots;
        std::size_t count;
    };

    void prepare(const std::string &kernels, const std::vector<Memory> &allocations,
                 const std::vector<Group> &groups);
    void prepare_layout(const Group &group, const std::vector<Memory> &allocations);
    Event new_event(unsigned flags);
    Span new_span();
    double seconds(const Span &span) const;
    Lane &lane_of(Direction direction) { return lanes_[direction == Direction::gather ? 0 : 1]; }
    void begin(std::int64_t marker, Event begun, Stream stream);
    void wait_marker(std::int64_t marker, Stream stream);
    void keep_order(Lane &lane, Route route);
    static Stream first_of(const Lane &lane, Direction direction, Route route);
    Stream queue(Direction direction, const Layout &layout, Rows rows, Route route);
    void queue_dma(Direction direction, const Layout &layout, Rows rows, Stream stream);
    void queue_staged(Direction direction, const Layout &layout, Rows rows);
    void launch(Direction direction, const Layout &layout, Rows rows, Address payloads,
                std::int64_t stride, Stream stream);
    void add(Direction direction, Address in_block, Address in_slot, std::int64_t nbytes,
             Stream stream);
    void flush(Stream stream);
    Address payload_at(const Plan &plan, std::int64_t slot) const;
    void release();

    std::shared_ptr<const Driver> driver_;
    int device_;
    SlabShape slab_;
    DeviceTuning tuning_;
    std::int64_t buffer_nbytes_ = 0;
    Module module_ = nullptr;
    Function gather_ = nullptr, scatter_ = nullptr;
    std::vector<Layout> layouts_;
    std::vector<Plan> plans_;
    Lane lanes_[2];
    std::vector<Span> spare_;  // for tickets
    bool closed_ = false;
    // Copies that wait for their call; their capacity never changes.
    std::vector<Address> targets_, sources_;
    std::vector<std::size_t> sizes_;
    kernel::Batch batch_{};

    std::mutex tickets_mutex_;  // guards what follows, up to the next
    std::unordered_map<std::int64_t, Span> pending_;
    std::int64_t submitted_ = 0;

    std::mutex markers_mutex_;  // guards what follows
    std::vector<Event> markers_;
    std::int64_t marked_ = 0;
};

}  // namespace kvtiers::cuda
