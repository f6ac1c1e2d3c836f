// A CUDA driver without a device: streams are queues, memory is the host's, kernels run on the CPU
// from the header that the real ones are made of. The tests say which version it pretends, when a
// queue moves, which wait or record is forgotten and which call fails. Its clock counts a copy or a
// kernel as a millisecond, and the engine's work as a second.
#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "../../csrc/cuda/block_index.h"

namespace {

using Address = unsigned long long;

struct Event {
    bool timed = false;
    int recorded = 0;  // times
    int executed = 0;  // the last of them that its stream has come to
    double at = 0;     // milliseconds
    bool reached() const { return executed == recorded; }
};

struct Item {
    std::function<bool()> ready;
    std::function<void()> work;
};

struct Stream {
    std::deque<Item> items;
};

struct World {
    int version = 13000;
    bool manual = false;
    int forget_wait = -1;  // the number of a wait from now on that does nothing
    int num_waits = 0;
    int forget_record = -1;  // the number of a record from now on that does nothing
    int num_records = 0;
    int spoil = 0;           // what is wrong with copies: see fake_spoil
    double now = 0;          // milliseconds
    bool capturing = false;
    int same_addresses = 1;  // whether registered memory keeps its address on the device
    std::string failing;
    int failing_after = 0;
    int failing_code = 0;
    int live = 0;   // objects and allocations
    unsigned max_grid = 0;  // thread blocks of the largest launch
    std::vector<Stream *> streams;
    std::map<void *, std::size_t> registered;
    std::map<std::string, int> calls;
} world;

std::recursive_mutex one_at_a_time;
std::atomic<bool> held_up{false};    // whether who asks for a capture gets no answer
std::atomic<int> num_held_up{0};     // how many are waiting for it
thread_local int depth = 0;         // contexts pushed by this thread
thread_local int capture_mode = 0;  // of this thread: 0 is global, 2 is relaxed
constexpr int kHandle = 7;          // of device 0

Stream legacy;
int context_object, gather_object, scatter_object;

// Counts a call; returns the error that a test wants of it, or one for a forgotten context.
int called(const char *name, bool needs_context = true) {
    const std::lock_guard<std::recursive_mutex> guard(one_at_a_time);
    ++world.calls[name];
    if (needs_context && depth < 1) return 201;
    // What a thread may not call while any stream is captured, but in relaxed mode.
    static const std::set<std::string> unsafe = {
        "cuEventQuery", "cuEventSynchronize", "cuStreamSynchronize", "cuMemAlloc", "cuMemFree",
        "cuMemcpyHtoD", "cuMemHostRegister", "cuMemHostUnregister", "cuModuleUnload"};
    if (world.capturing && capture_mode != 2 && unsafe.count(name)) return 900;
    if (world.failing == name && world.failing_after-- == 0) return world.failing_code;
    return 0;
}

bool step(Stream &stream) {
    if (stream.items.empty() || !stream.items.front().ready()) return false;
    stream.items.front().work();
    stream.items.pop_front();
    return true;
}

void run() {
    bool moved = true;
    while (moved) {
        moved = step(legacy);
        for (Stream *stream : world.streams) moved = step(*stream) || moved;
    }
}

Stream &at(void *stream) { return stream == nullptr ? legacy : *static_cast<Stream *>(stream); }

void put(void *stream, std::function<void()> work) {
    at(stream).items.push_back({[] { return true; }, std::move(work)});
    if (!world.manual) run();
}

#define CALL(name)                                                    \
    const std::lock_guard<std::recursive_mutex> guard(one_at_a_time); \
    if (const int code = called(name)) return code

int init(unsigned) { return called("cuInit", false); }
int error_name(int code, const char **name) {
    *name = code == 712 ? "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED" : "CUDA_ERROR_PRETENDED";
    return 0;
}
int device_count(int *count) { return *count = 1, called("cuDeviceGetCount", false); }
int device_get(int *handle, int ordinal) {
    *handle = kHandle + ordinal;
    return ordinal == 0 ? called("cuDeviceGet", false) : 101;
}
int attribute(int *value, int which, int device) {
    *value = which == 75 ? 9 : which == 76 ? 0 : world.same_addresses;
    return device == kHandle ? called("cuDeviceGetAttribute", false) : 101;
}
int retain(void **context, int device) {
    *context = &context_object;
    return device == kHandle ? called("cuDevicePrimaryCtxRetain", false) : 101;
}
int pci_address(char *text, int size, int device) {
    std::strncpy(text, "0000:3B:00.0", static_cast<std::size_t>(size));
    return device == kHandle ? called("cuDeviceGetPCIBusId", false) : 101;
}
int push(void *context) {
    if (context != &context_object) return 201;
    return ++depth, called("cuCtxPushCurrent");
}
int pop(void **) { return --depth, called("cuCtxPopCurrent", false); }
int exchange(int *mode) {
    std::swap(*mode, capture_mode);
    return called("cuThreadExchangeStreamCaptureMode", false);
}
int stream_create(void **stream, unsigned flags) {
    CALL("cuStreamCreate");
    if (flags != 1) return 1;
    world.streams.push_back(new Stream);
    *stream = world.streams.back();
    return ++world.live, 0;
}
int stream_destroy(void *stream) {
    called("cuStreamDestroy");
    for (std::size_t i = 0; i < world.streams.size(); ++i)
        if (world.streams[i] == stream) world.streams.erase(world.streams.begin() + i);
    delete static_cast<Stream *>(stream);
    return --world.live, 0;
}
int stream_synchronize(void *stream) {
    CALL("cuStreamSynchronize");
    while (!at(stream).items.empty()) {  // the others run as far as this one waits for them
        bool moved = step(at(stream));
        for (std::size_t i = 0; !moved && i < world.streams.size(); ++i)
            moved = step(*world.streams[i]);
        if (!moved && !step(legacy)) return 999;  // a deadlock
    }
    return 0;
}
int stream_wait(void *stream, void *event, unsigned) {
    CALL("cuStreamWaitEvent");
    // The record that counts is the last one before this call.
    const auto *target = static_cast<Event *>(event);
    const int record = target->recorded;
    if (record == 0 || world.num_waits++ == world.forget_wait) return 0;
    at(stream).items.push_back({[=] { return target->executed >= record; }, [] {}});
    if (!world.manual) run();
    return 0;
}
int is_capturing(void *, int *status) {
    ++num_held_up;
    while (held_up) std::this_thread::yield();
    --num_held_up;
    *status = world.capturing ? 1 : 0;
    return called("cuStreamIsCapturing");
}
int event_create(void **event, unsigned flags) {
    CALL("cuEventCreate");
    if (flags != 0 && flags != 2) return 1;
    *event = new Event;
    static_cast<Event *>(*event)->timed = flags == 0;
    return ++world.live, 0;
}
int event_destroy(void *event) {
    called("cuEventDestroy");
    delete static_cast<Event *>(event);
    return --world.live, 0;
}
int event_record(void *event, void *stream) {
    CALL("cuEventRecord");
    auto *target = static_cast<Event *>(event);
    if (world.num_records++ == world.forget_record) return 0;
    const int record = ++target->recorded;
    put(stream, [=] { target->executed = record, target->at = world.now; });
    return 0;
}
int event_elapsed(float *milliseconds, void *start, void *end) {
    CALL("cuEventElapsedTime");
    const auto *first = static_cast<Event *>(start), *second = static_cast<Event *>(end);
    if (!first->timed || !second->timed) return 400;
    if (!first->reached() || !second->reached()) return 600;
    *milliseconds = static_cast<float>(second->at - first->at);
    return 0;
}
int event_query(void *event) {
    CALL("cuEventQuery");
    return static_cast<Event *>(event)->reached() ? 0 : 600;
}
int event_synchronize(void *event) {
    CALL("cuEventSynchronize");
    run();
    return static_cast<Event *>(event)->reached() ? 0 : 999;
}
int alloc(Address *address, std::size_t nbytes) {
    CALL("cuMemAlloc");
    *address = reinterpret_cast<Address>(new std::uint64_t[nbytes / 8 + 32]);
    return ++world.live, 0;
}
int free_memory(Address address) {
    called("cuMemFree");
    delete[] reinterpret_cast<std::uint64_t *>(address);
    return --world.live, 0;
}
int host_register(void *address, std::size_t nbytes, unsigned flags) {
    CALL("cuMemHostRegister");
    if (flags != 3) return 1;  // for every context, and mapped for kernels
    if (reinterpret_cast<std::uintptr_t>(address) % 4096 != 0 || nbytes == 0) return 1;
    if (world.registered.count(address)) return 712;
    world.registered[address] = nbytes;
    return 0;
}
int host_unregister(void *address) {
    CALL("cuMemHostUnregister");
    return world.registered.erase(address) ? 0 : 713;
}
int module_load(void **module, const void *) {
    *module = &context_object;
    return called("cuModuleLoadData");
}
int module_unload(void *) { return called("cuModuleUnload"); }
int module_function(void **function, void *, const char *name) {
    const bool gather = std::string(name) == "kvtiers_gather";
    *function = gather ? &gather_object : &scatter_object;
    return 0;
}
// Breaks what a copy wrote, where a test wants that.
void spoil(int what, Address written) {
    if (world.spoil != what) return;
    *reinterpret_cast<unsigned char *>(written) ^= 0x10;
}
int launch(void *function, unsigned grid, unsigned grid_y, unsigned grid_z, unsigned threads,
           unsigned threads_y, unsigned threads_z, unsigned shared_nbytes, void *stream,
           void **arguments, void **extra) {
    CALL("cuLaunchKernel");
    namespace kernel = kvtiers::kernel;
    if (stream == nullptr || threads != kernel::kThreads || grid < 1) return 1;
    if (grid_y * grid_z * threads_y * threads_z != 1 || shared_nbytes || extra) return 1;
    world.max_grid = std::max(world.max_grid, grid);
    const auto batch =
        std::make_shared<kernel::Batch>(*static_cast<const kernel::Batch *>(arguments[0]));
    const bool gather = function == &gather_object;
    put(stream, [=] {
        world.now += 1;
        const kernel::i64 warps = grid * (kernel::kThreads / kernel::kLanes);
        for (kernel::i64 warp = 0; warp < warps; ++warp)
            for (kernel::u32 lane = 0; lane < kernel::kLanes; ++lane)
                gather ? kernel::copy_share<true>(*batch, warp, warps, lane)
                       : kernel::copy_share<false>(*batch, warp, warps, lane);
        const kernel::Tile tile = kernel::tile_of(*batch, batch->tiles_per_block - 1);
        if (!gather) return spoil(2, tile.in_block);
        spoil(1, tile.in_slot);
        spoil(4, tile.in_slot + static_cast<Address>(tile.nbytes));  // just behind it
    });
    return 0;
}
int upload(Address target, const void *source, std::size_t nbytes) {
    CALL("cuMemcpyHtoD");
    std::memcpy(reinterpret_cast<void *>(target), source, nbytes);
    return 0;
}
int copy_one(Address target, Address source, std::size_t nbytes, void *stream) {
    if (stream == nullptr) return 1;
    put(stream, [=] {
        world.now += 1;
        std::memcpy(reinterpret_cast<void *>(target), reinterpret_cast<void *>(source), nbytes);
        spoil(3, target);
    });
    return 0;
}
int copy(Address target, Address source, std::size_t nbytes, void *stream) {
    CALL("cuMemcpyAsync");
    return copy_one(target, source, nbytes, stream);
}
struct Attributes {
    int order;
    int hints[4];
    unsigned flags;
};
int batch(Address *targets, Address *sources, std::size_t *sizes, std::size_t count,
          Attributes *attributes, std::size_t *indices, std::size_t num, void *stream) {
    if (count == 0 || num != 1 || indices[0] != 0 || attributes->order != 1) return 1;
    for (std::size_t i = 0; i < count; ++i)
        if (const int code = copy_one(targets[i], sources[i], sizes[i], stream)) return code;
    return 0;
}
int batch13(Address *t, Address *s, std::size_t *n, std::size_t count, Attributes *attributes,
            std::size_t *indices, std::size_t num, void *stream) {
    CALL("cuMemcpyBatchAsync 13.0");
    return batch(t, s, n, count, attributes, indices, num, stream);
}
int batch12(Address *t, Address *s, std::size_t *n, std::size_t count, Attributes *attributes,
            std::size_t *indices, std::size_t num, std::size_t *failed, void *stream) {
    CALL("cuMemcpyBatchAsync 12.8");
    *failed = count;
    return batch(t, s, n, count, attributes, indices, num, stream);
}

const std::map<std::string, void *> kCalls = {
    {"cuInit", (void *)init},
    {"cuGetErrorName", (void *)error_name},
    {"cuDeviceGetCount", (void *)device_count},
    {"cuDeviceGet", (void *)device_get},
    {"cuDeviceGetAttribute", (void *)attribute},
    {"cuDevicePrimaryCtxRetain", (void *)retain},
    {"cuCtxPushCurrent", (void *)push},
    {"cuCtxPopCurrent", (void *)pop},
    {"cuThreadExchangeStreamCaptureMode", (void *)exchange},
    {"cuStreamCreate", (void *)stream_create},
    {"cuStreamDestroy", (void *)stream_destroy},
    {"cuStreamSynchronize", (void *)stream_synchronize},
    {"cuStreamWaitEvent", (void *)stream_wait},
    {"cuStreamIsCapturing", (void *)is_capturing},
    {"cuEventCreate", (void *)event_create},
    {"cuEventDestroy", (void *)event_destroy},
    {"cuEventRecord", (void *)event_record},
    {"cuEventQuery", (void *)event_query},
    {"cuEventSynchronize", (void *)event_synchronize},
    {"cuEventElapsedTime", (void *)event_elapsed},
    {"cuDeviceGetPCIBusId", (void *)pci_address},
    {"cuMemAlloc", (void *)alloc},
    {"cuMemFree", (void *)free_memory},
    {"cuMemHostRegister", (void *)host_register},
    {"cuMemHostUnregister", (void *)host_unregister},
    {"cuModuleLoadData", (void *)module_load},
    {"cuModuleUnload", (void *)module_unload},
    {"cuModuleGetFunction", (void *)module_function},
    {"cuLaunchKernel", (void *)launch},
    {"cuMemcpyHtoD", (void *)upload},
    {"cuMemcpyAsync", (void *)copy},
};

}  // namespace

extern "C" {

int cuDriverGetVersion(int *version) { return *version = world.version, 0; }

int cuGetProcAddress_v2(const char *name, void **found, int version, std::uint64_t flags, int *) {
    *found = nullptr;
    if (version > world.version || flags != 1) return 500;
    if (std::string(name) == "cuMemcpyBatchAsync") {
        if (version < 12080) return 500;
        *found = version >= 13000 ? (void *)batch13 : (void *)batch12;
        return 0;
    }
    const auto entry = kCalls.find(name);
    if (entry == kCalls.end()) return 500;
    *found = entry->second;
    return 0;
}

// What only the tests call.
void fake_reset(int version) {
    world = World{};
    depth = 0;
    capture_mode = 0;
    world.version = version;
    legacy.items.clear();
}
void fake_abandon() {  // what is queued: its memory may be gone
    for (Stream *stream : world.streams) stream->items.clear();
    legacy.items.clear();
}
void fake_manual(int manual) { world.manual = manual; }
void fake_forget_wait(int number) { world.forget_wait = number, world.num_waits = 0; }
int fake_num_waits() { return world.num_waits; }
void fake_forget_record(int number) { world.forget_record = number, world.num_records = 0; }
int fake_num_records() { return world.num_records; }
// 1: what a kernel gathers, 2: what one scatters, 3: each copy, 4: what lies behind a gather.
void fake_spoil(int what) { world.spoil = what; }
void fake_capturing(int capturing) { world.capturing = capturing; }
void fake_hold_up(int hold_up) { held_up = hold_up != 0; }
int fake_num_held_up() { return num_held_up; }
void fake_fail(const char *name, int after, int code) {
    world.failing = name, world.failing_after = after, world.failing_code = code;
}
int fake_calls(const char *name) { return world.calls[name]; }
int fake_live() { return world.live; }
int fake_depth() { return depth; }
int fake_max_grid() { return static_cast<int>(world.max_grid); }
int fake_capture_mode() { return capture_mode; }
void fake_other_addresses() { world.same_addresses = 0; }
// The names of all calls so far with their numbers, one a line; returns the text's length.
int fake_called(char *text, int size) {
    std::string lines;
    for (const auto &[name, count] : world.calls) lines += name + "\t" + std::to_string(count) + "\n";
    if (static_cast<int>(lines.size()) < size) std::strcpy(text, lines.c_str());
    return static_cast<int>(lines.size());
}
int fake_num_registered() { return static_cast<int>(world.registered.size()); }
int fake_num_streams() { return static_cast<int>(world.streams.size()); }
void *fake_stream() { return world.streams.push_back(new Stream), world.streams.back(); }
int fake_step(int index) { return step(*world.streams[static_cast<std::size_t>(index)]); }
int fake_queued(int index) {
    return static_cast<int>(world.streams[static_cast<std::size_t>(index)]->items.size());
}
int fake_step_of(void *stream) { return step(at(stream)); }
void fake_run() { run(); }
void fake_fill(void *stream, Address address, int value, std::size_t nbytes) {
    put(stream, [=] {
        world.now += 1000;
        std::memset(reinterpret_cast<void *>(address), value, nbytes);
    });
}
void fake_read(void *stream, Address to, Address from, std::size_t nbytes) {
    put(stream,
        [=] { std::memcpy(reinterpret_cast<void *>(to), reinterpret_cast<void *>(from), nbytes); });
}
}
