#include "device_copier.hpp"

#include <algorithm>
#include <limits>
#include <utility>

namespace kvtiers::cuda {
namespace {

constexpr unsigned kNonBlocking = 1;    // a stream that does not wait for the legacy stream
constexpr unsigned kTiming = 0;         // an event that knows when it was
constexpr unsigned kDisableTiming = 2;  // an event that does not, and costs less
constexpr int kHostAddresses = 91;      // attribute: registered memory keeps its address there
constexpr std::size_t kSpareSpans = 64;
}  // namespace

DeviceCopier::DeviceCopier(std::shared_ptr<const Driver> driver, int device,
                           const std::vector<Memory> &allocations,
                           const std::vector<Group> &groups, SlabShape slab,
                           const std::string &kernels, DeviceTuning tuning)
    : driver_(std::move(driver)), device_(device), slab_(slab), tuning_(tuning) {
    check_slab(slab);
    if (tuning.num_thread_blocks < 1 || tuning.num_markers < 1 || tuning.staging_nbytes < 0 ||
        tuning.tile_nbytes < 16 || tuning.tile_nbytes % 16 != 0)
        refuse("thread blocks, markers and staging must be positive, a tile a multiple of 16");
    const Current current(*driver_, device_);
    int same = 0;
    driver_->check("cuDeviceGetAttribute",
                   (*driver_)().device_attribute(&same, kHostAddresses,
                                                 driver_->handle(device)));
    if (same == 0) throw Error("the device has other addresses for page-locked memory");
    try {
        prepare(kernels, allocations, groups);
    } catch (...) {
        release();
        throw;
    }
}

DeviceCopier::~DeviceCopier() { close(); }

void DeviceCopier::prepare(const std::string &kernels, const std::vector<Memory> &allocations,
                           const std::vector<Group> &groups) {
    const Driver &driver = *driver_;
    if (!kernels.empty()) {
        driver.check("cuModuleLoadData", driver().module_load(&module_, kernels.data()));
        driver.check("cuModuleGetFunction",
                     driver().module_function(&gather_, module_, "kvtiers_gather"));
        driver.check("cuModuleGetFunction",
                     driver().module_function(&scatter_, module_, "kvtiers_scatter"));
    }
    std::int64_t largest = 0;
    for (const Group &group : groups) {
        prepare_layout(group, allocations);
        largest = std::max(largest, plans_.back().payload_nbytes);
    }
    const std::int64_t share = tuning_.staging_nbytes / static_cast<std::int64_t>(kBuffers);
    buffer_nbytes_ = round_up(std::max(share, largest), kStagingAlignment);
    for (Lane &lane : lanes_) {
        driver.check("cuStreamCreate", driver().stream_create(&lane.copies, kNonBlocking));
        driver.check("cuStreamCreate", driver().stream_create(&lane.kernels, kNonBlocking));
        lane.turn = new_event(kDisableTiming);
        if (module_ == nullptr) continue;
        driver.check("cuMemAlloc",
                     driver().alloc(&lane.staging, static_cast<std::size_t>(buffer_nbytes_) *
                                                       kBuffers));
        for (std::size_t i = 0; i < kBuffers; ++i) {
            lane.filled[i] = new_event(kDisableTiming);
            lane.emptied[i] = new_event(kDisableTiming);
        }
    }
    for (int i = 0; i < tuning_.num_markers; ++i) markers_.push_back(new_event(kDisableTiming));
    for (std::size_t i = 0; i < kSpareSpans; ++i) spare_.push_back(new_span());
    targets_.reserve(kMaxCopies);
    sources_.reserve(kMaxCopies);
    sizes_.reserve(kMaxCopies);
}

void DeviceCopier::prepare_layout(const Group &group, const std::vector<Memory> &allocations) {
    Layout layout{plan_of(group, allocations, slab_)};
    constexpr std::int64_t limit = std::numeric_limits<std::uint32_t>::max();
    if (group.num_blocks > limit || slab_.num_slots > limit)
        refuse("more than 2**32 - 1 blocks or slots");
    plans_.push_back(layout.plan);
    layouts_.push_back(layout);
    if (module_ == nullptr) return;
    std::vector<kernel::Piece> pieces;
    std::int64_t tiles = 0;
    for (const kvtiers::Piece &piece : layout.plan.pieces) {
        pieces.push_back({piece.base, piece.block_stride, piece.nbytes, piece.payload_offset,
                          tiles});
        tiles += round_up(piece.nbytes, tuning_.tile_nbytes) / tuning_.tile_nbytes;
    }
    layouts_.back().tiles_per_block = tiles;
    const std::size_t nbytes = pieces.size() * sizeof(kernel::Piece);
    driver_->check("cuMemAlloc", (*driver_)().alloc(&layouts_.back().pieces, nbytes));
    driver_->check("cuMemcpyHtoD",
                   (*driver_)().upload(layouts_.back().pieces, pieces.data(), nbytes));
}

Event DeviceCopier::new_event(unsigned flags) {
    Event event = nullptr;
    driver_->check("cuEventCreate", (*driver_)().event_create(&event, flags));
    return event;
}

DeviceCopier::Span DeviceCopier::new_span() {
    Span span{new_event(kTiming), nullptr};
    try {
        span.over = new_event(kTiming);
    } catch (...) {
        (*driver_)().event_destroy(span.begun);
        throw;
    }
    return span;
}

double DeviceCopier::seconds(const Span &span) const {
    float milliseconds = 0;
    driver_->check("cuEventElapsedTime",
                   (*driver_)().event_elapsed(&milliseconds, span.begun, span.over));
    return milliseconds / 1e3;
}

std::int64_t DeviceCopier::mark(std::uintptr_t stream) {
    const Driver &driver = *driver_;
    const std::lock_guard<std::mutex> guard(markers_mutex_);
    if (markers_.empty()) throw Error("the copier is closed");
    const Current current(*driver_, device_);
    const auto engine = reinterpret_cast<Stream>(stream);
    int capturing = 0;
    driver.check("cuStreamIsCapturing", driver().stream_is_capturing(engine, &capturing));
    if (capturing != 0) throw Error("the engine's stream is being captured: no point to wait for");
    const auto count = static_cast<std::int64_t>(markers_.size());
    const Event event = markers_[static_cast<std::size_t>(marked_ % count)];
    if (marked_ >= count)  // its marker keeps its promise: all that is queued later comes after it
        for (const Lane &lane : lanes_)
            for (const Stream copying : {lane.copies, lane.kernels})
                driver.check("cuStreamWaitEvent", driver().stream_wait(copying, event, 0));
    driver.check("cuEventRecord", driver().event_record(event, engine));
    return ++marked_;
}

void DeviceCopier::wait_marker(std::int64_t marker, Stream stream) {
    if (marker == 0) return;
    const std::lock_guard<std::mutex> guard(markers_mutex_);
    const auto count = static_cast<std::int64_t>(markers_.size());
    if (marker + count <= marked_) return;  // every stream has waited for it
    const Event event = markers_[static_cast<std::size_t>((marker - 1) % count)];
    driver_->check("cuStreamWaitEvent", (*driver_)().stream_wait(stream, event, 0));
}

std::int64_t DeviceCopier::submit(Direction direction, std::int64_t group,
                                  const std::vector<std::int64_t> &block_ids,
                                  const std::vector<std::int64_t> &slots, std::int64_t after,
                                  Route route) {
    if (closed_) throw Error("the copier is closed");
    check_rows(direction, plan_at(plans_, group), slab_, block_ids, slots);
    {
        const std::lock_guard<std::mutex> guard(markers_mutex_);
        if (after < 0 || after > marked_)
            throw std::out_of_range("marker " + std::to_string(after) + " was never issued");
    }
    if (module_ == nullptr) route = Route::dma;
    const Current current(*driver_, device_);
    Lane &lane = lane_of(direction);
    const Layout &layout = layouts_[static_cast<std::size_t>(group)];
    if (spare_.empty()) spare_.push_back(new_span());
    const Span span = spare_.back();
    try {
        keep_order(lane, route);
        begin(after, span.begun, first_of(lane, direction, route));
        lane.last =
            queue(direction, layout, {block_ids.data(), slots.data(), slots.size()}, route);
        driver_->check("cuEventRecord", (*driver_)().event_record(span.over, lane.last));
    } catch (const Error &) {  // the slots are the caller's again
        (*driver_)().stream_synchronize(lane.copies);
        (*driver_)().stream_synchronize(lane.kernels);
        throw;
    }
    spare_.pop_back();
    pending_[++submitted_] = span;
    return submitted_;
}

// Batches of one route follow each other in each stream by themselves.
void DeviceCopier::keep_order(Lane &lane, Route route) {
    const auto &calls = (*driver_)();
    if (lane.last != nullptr && lane.route != route) {
        driver_->check("cuEventRecord", calls.event_record(lane.turn, lane.last));
        for (const Stream stream : {lane.copies, lane.kernels})
            if (stream != lane.last)
                driver_->check("cuStreamWaitEvent", calls.stream_wait(stream, lane.turn, 0));
    }
    lane.route = route;
}

// A reload's staging could run ahead of the marker: only the kernel touches what is the engine's. It
// waits all the same, so that what a batch takes can be told from what it waited.
Stream DeviceCopier::first_of(const Lane &lane, Direction direction, Route route) {
    const bool staged_in = route == Route::staged && direction == Direction::scatter;
    return route == Route::dma || staged_in ? lane.copies : lane.kernels;
}

// Everything else that the batch queues comes after what its first stream does.
void DeviceCopier::begin(std::int64_t marker, Event begun, Stream stream) {
    wait_marker(marker, stream);
    driver_->check("cuEventRecord", (*driver_)().event_record(begun, stream));
}

std::optional<double> DeviceCopier::done(std::int64_t ticket) {
    const auto found = pending_.find(ticket);
    if (found == pending_.end())
        throw std::out_of_range("ticket " + std::to_string(ticket) + " is not pending");
    const Span span = found->second;
    if (span.over == nullptr) {  // closed, which waited for it
        pending_.erase(found);
        return 0;
    }
    const Current current(*driver_, device_);
    const Result result = (*driver_)().event_query(span.over);
    if (result == kNotReady) return std::nullopt;
    pending_.erase(found);
    spare_.push_back(span);
    driver_->check("cuEventQuery", result);
    return seconds(span);
}

void DeviceCopier::wait(std::int64_t ticket) {
    if (ticket < 1 || ticket > submitted_)
        throw std::out_of_range("ticket " + std::to_string(ticket) + " was never issued");
    const auto found = pending_.find(ticket);
    if (found == pending_.end() || found->second.over == nullptr) return;
    const Current current(*driver_, device_);
    driver_->check("cuEventSynchronize", (*driver_)().event_synchronize(found->second.over));
}

std::string DeviceCopier::close() {
    if (closed_) return "";
    closed_ = true;
    std::string failed;
    try {
        const Current current(*driver_, device_);
        for (const Lane &lane : lanes_)
            for (const Stream stream : {lane.copies, lane.kernels}) try {
                    driver_->check("cuStreamSynchronize", (*driver_)().stream_synchronize(stream));
                } catch (const Error &error) {
                    failed = error.what();
                }
        release();
    } catch (const Error &error) {
        failed = error.what();
    }
    return failed;
}

// Errors are of no use here: what cannot be released goes with the context.
void DeviceCopier::release() {
    const auto &calls = (*driver_)();
    const auto drop = [&calls](Event event) {
        if (event != nullptr) calls.event_destroy(event);
    };
    {  // first: the engine's thread may still mark, which uses streams
        const std::lock_guard<std::mutex> guard(markers_mutex_);
        for (const Event event : markers_) drop(event);
        markers_.clear();
    }
    for (Lane &lane : lanes_) {
        drop(lane.turn);
        for (std::size_t i = 0; i < kBuffers; ++i) {
            drop(lane.filled[i]);
            drop(lane.emptied[i]);
        }
        for (const Stream stream : {lane.copies, lane.kernels})
            if (stream != nullptr) calls.stream_destroy(stream);
        if (lane.staging != 0) calls.free(lane.staging);
        lane = Lane{};
    }
    for (const Layout &layout : layouts_)
        if (layout.pieces != 0) calls.free(layout.pieces);
    layouts_.clear();
    for (auto &[ticket, span] : pending_) {
        drop(span.begun);
        drop(span.over);
        span = Span{};
    }
    for (const Span &span : spare_) {
        drop(span.begun);
        drop(span.over);
    }
    spare_.clear();
    if (module_ != nullptr) calls.module_unload(module_);
    module_ = nullptr;
}

}  // namespace kvtiers::cuda
