// What a batch becomes on the streams, by each route.
#include <algorithm>

#include "device_copier.hpp"

namespace kvtiers::cuda {

// Returns the stream that finishes the batch.
Stream DeviceCopier::queue(Direction direction, const Layout &layout, Rows rows, Route route) {
    Lane &lane = lane_of(direction);
    targets_.clear();
    sources_.clear();
    sizes_.clear();
    // What begins a batch ends an empty one: else its end might come before its marker.
    if (rows.count == 0) return first_of(lane, direction, route);
    if (route == Route::dma) {
        queue_dma(direction, layout, rows, lane.copies);
        return lane.copies;
    }
    if (route == Route::direct) {
        launch(direction, layout, rows, payload_at(layout.plan, 0), slab_.slot_nbytes,
               lane.kernels);
        return lane.kernels;
    }
    queue_staged(direction, layout, rows);
    return direction == Direction::gather ? lane.copies : lane.kernels;
}

void DeviceCopier::queue_dma(Direction direction, const Layout &layout, Rows rows,
                             Stream stream) {
    for (std::size_t i = 0; i < rows.count; ++i) {
        const Address payload = payload_at(layout.plan, rows.slots[i]);
        for (const kvtiers::Piece &piece : layout.plan.pieces)
            add(direction,
                piece.base + static_cast<Address>(rows.block_ids[i] * piece.block_stride),
                payload + static_cast<Address>(piece.payload_offset), piece.nbytes, stream);
    }
    flush(stream);
}

// Kernel and copy engines work on neighbouring buffers at the same time.
void DeviceCopier::queue_staged(Direction direction, const Layout &layout, Rows rows) {
    const auto &calls = (*driver_)();
    const bool gather = direction == Direction::gather;
    Lane &lane = lane_of(direction);
    const Stream first = gather ? lane.kernels : lane.copies;
    const Stream second = gather ? lane.copies : lane.kernels;
    const std::int64_t stride = round_up(layout.plan.payload_nbytes, kStagingAlignment);
    const std::size_t step = std::min<std::size_t>(
        kernel::kMaxRows, static_cast<std::size_t>(buffer_nbytes_ / stride));
    for (std::size_t start = 0; start < rows.count; start += step) {
        const Rows part{rows.block_ids + start, nullptr, std::min(step, rows.count - start)};
        const std::size_t buffer = lane.next;
        lane.next = (buffer + 1) % kBuffers;
        const Address staged =
            lane.staging + buffer * static_cast<Address>(buffer_nbytes_);
        const auto copy = [&](Stream stream) {
            for (std::size_t i = 0; i < part.count; ++i)
                add(direction, staged + i * static_cast<Address>(stride),
                    payload_at(layout.plan, rows.slots[start + i]), layout.plan.payload_nbytes,
                    stream);
            flush(stream);
        };
        driver_->check("cuStreamWaitEvent", calls.stream_wait(first, lane.emptied[buffer], 0));
        if (gather)
            launch(direction, layout, part, staged, stride, first);
        else
            copy(first);
        driver_->check("cuEventRecord", calls.event_record(lane.filled[buffer], first));
        driver_->check("cuStreamWaitEvent", calls.stream_wait(second, lane.filled[buffer], 0));
        if (gather)
            copy(second);
        else
            launch(direction, layout, part, staged, stride, second);
        driver_->check("cuEventRecord", calls.event_record(lane.emptied[buffer], second));
    }
}

// Without slots, row i goes to place i.
void DeviceCopier::launch(Direction direction, const Layout &layout, Rows rows, Address payloads,
                          std::int64_t stride, Stream stream) {
    batch_.pieces = reinterpret_cast<const kernel::Piece *>(layout.pieces);
    batch_.payloads = payloads;
    batch_.slot_stride = stride;
    batch_.tile_nbytes = tuning_.tile_nbytes;
    batch_.tiles_per_block = layout.tiles_per_block;
    batch_.num_pieces = static_cast<kernel::u32>(layout.plan.pieces.size());
    const Function function = direction == Direction::gather ? gather_ : scatter_;
    for (std::size_t start = 0; start < rows.count; start += kernel::kMaxRows) {
        const std::size_t count = std::min<std::size_t>(kernel::kMaxRows, rows.count - start);
        for (std::size_t i = 0; i < count; ++i) {
            const std::size_t row = start + i;
            batch_.block_ids[i] = static_cast<kernel::u32>(rows.block_ids[row]);
            batch_.slots[i] = static_cast<kernel::u32>(
                rows.slots == nullptr ? static_cast<std::int64_t>(row) : rows.slots[row]);
        }
        batch_.num_rows = static_cast<kernel::u32>(count);
        const std::int64_t warps = layout.tiles_per_block * static_cast<std::int64_t>(count);
        const std::int64_t fit = round_up(warps, kernel::kThreads / kernel::kLanes) /
                                 (kernel::kThreads / kernel::kLanes);
        const auto grid = static_cast<unsigned>(
            std::min<std::int64_t>(tuning_.num_thread_blocks, fit));
        void *arguments[] = {&batch_};  // copied by the call
        driver_->check("cuLaunchKernel", (*driver_)().launch(function, grid, 1, 1,
                                                             kernel::kThreads, 1, 1, 0, stream,
                                                             arguments, nullptr));
    }
}

void DeviceCopier::add(Direction direction, Address in_block, Address in_slot,
                       std::int64_t nbytes, Stream stream) {
    const bool gather = direction == Direction::gather;
    targets_.push_back(gather ? in_slot : in_block);
    sources_.push_back(gather ? in_block : in_slot);
    sizes_.push_back(static_cast<std::size_t>(nbytes));
    if (sizes_.size() == kMaxCopies) flush(stream);
}

void DeviceCopier::flush(Stream stream) {
    driver_->copy_batch(targets_.data(), sources_.data(), sizes_.data(), sizes_.size(), stream);
    targets_.clear();
    sources_.clear();
    sizes_.clear();
}

Address DeviceCopier::payload_at(const Plan &plan, std::int64_t slot) const {
    return slab_.address + static_cast<Address>(slot * slab_.slot_nbytes + plan.header_nbytes);
}

}  // namespace kvtiers::cuda
