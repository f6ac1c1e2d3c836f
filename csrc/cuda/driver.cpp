#include "driver.hpp"

#include <dlfcn.h>

namespace kvtiers::cuda {
namespace {

constexpr unsigned kPortableMapped = 3;  // registered memory: for all contexts, with an address
constexpr int kOldest = 12000;  // the first to have cuGetProcAddress_v2

using Batch12 = Result (*)(Address *, Address *, std::size_t *, std::size_t, CopyAttributes *,
                           std::size_t *, std::size_t, std::size_t *, Stream);
using Batch13 = Result (*)(Address *, Address *, std::size_t *, std::size_t, CopyAttributes *,
                           std::size_t *, std::size_t, Stream);

std::string named(int version) {
    return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

}  // namespace

Driver::Driver(const std::string &library) {
    // Never closed: the driver does not bear it, and the engine uses it as well.
    void *handle = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) throw Error(std::string("no CUDA driver: ") + dlerror());
    const auto get_version =
        reinterpret_cast<Result (*)(int *)>(dlsym(handle, "cuDriverGetVersion"));
    if (get_version != nullptr) get_version(&version_);
    get_proc_address_ = reinterpret_cast<decltype(get_proc_address_)>(
        dlsym(handle, "cuGetProcAddress_v2"));
    if (get_proc_address_ == nullptr || version_ < kOldest)
        throw Error("the CUDA driver is of version " + named(version_) + ", needed is 12.0");

    const auto bind = [this](auto &call, const char *name) {
        call = reinterpret_cast<std::decay_t<decltype(call)>>(find(name, kOldest));
        if (call == nullptr) throw Error(std::string("the CUDA driver has no ") + name);
    };
    bind(calls_.init, "cuInit");
    bind(calls_.get_error_name, "cuGetErrorName");
    bind(calls_.device_count, "cuDeviceGetCount");
    bind(calls_.device_get, "cuDeviceGet");
    bind(calls_.device_attribute, "cuDeviceGetAttribute");
    bind(calls_.device_pci_address, "cuDeviceGetPCIBusId");
    bind(calls_.context_retain, "cuDevicePrimaryCtxRetain");
    bind(calls_.context_push, "cuCtxPushCurrent");
    bind(calls_.context_pop, "cuCtxPopCurrent");
    bind(calls_.exchange_capture_mode, "cuThreadExchangeStreamCaptureMode");
    bind(calls_.stream_create, "cuStreamCreate");
    bind(calls_.stream_destroy, "cuStreamDestroy");
    bind(calls_.stream_synchronize, "cuStreamSynchronize");
    bind(calls_.stream_wait, "cuStreamWaitEvent");
    bind(calls_.stream_is_capturing, "cuStreamIsCapturing");
    bind(calls_.event_create, "cuEventCreate");
    bind(calls_.event_destroy, "cuEventDestroy");
    bind(calls_.event_record, "cuEventRecord");
    bind(calls_.event_query, "cuEventQuery");
    bind(calls_.event_synchronize, "cuEventSynchronize");
    bind(calls_.event_elapsed, "cuEventElapsedTime");
    bind(calls_.alloc, "cuMemAlloc");
    bind(calls_.free, "cuMemFree");
    bind(calls_.host_register, "cuMemHostRegister");
    bind(calls_.host_unregister, "cuMemHostUnregister");
    bind(calls_.module_load, "cuModuleLoadData");
    bind(calls_.module_unload, "cuModuleUnload");
    bind(calls_.module_function, "cuModuleGetFunction");
    bind(calls_.launch, "cuLaunchKernel");
    bind(calls_.upload, "cuMemcpyHtoD");
    bind(calls_.copy, "cuMemcpyAsync");
    for (const int version : {13000, 12080}) {
        if (batch_ != nullptr || version_ < version) continue;
        batch_ = find("cuMemcpyBatchAsync", version);
        if (batch_ != nullptr) batch_version_ = version;
    }
    check("cuInit", calls_.init(0));
    check("cuDeviceGetCount", calls_.device_count(&num_devices_));
}

void *Driver::find(const char *name, int version) const {
    void *found = nullptr;
    // Flag 1: a stream of handle 0 is the legacy stream, which is what torch's handle 0 means.
    const Result result = get_proc_address_(name, &found, version, 1, nullptr);
    return result == 0 ? found : nullptr;
}

std::string Driver::explain(const char *call, Result result) const {
    const char *name = nullptr;
    if (calls_.get_error_name == nullptr || calls_.get_error_name(result, &name) != 0 ||
        name == nullptr)
        name = "unknown error";
    return std::string(call) + ": " + name + " (" + std::to_string(result) + ")";
}

void Driver::check(const char *call, Result result) const {
    if (result != 0) throw Error(explain(call, result));
}

void Driver::copy_batch(Address *targets, Address *sources, std::size_t *sizes, std::size_t count,
                        Stream stream) const {
    if (count == 0) return;
    if (batch_version_ == 0) {
        for (std::size_t i = 0; i < count; ++i)
            check("cuMemcpyAsync", calls_.copy(targets[i], sources[i], sizes[i], stream));
        return;
    }
    CopyAttributes attributes{1, {0, 0}, {0, 0}, 0};
    std::size_t first = 0;
    if (batch_version_ >= 13000) {
        const auto call = reinterpret_cast<Batch13>(batch_);
        check("cuMemcpyBatchAsync",
              call(targets, sources, sizes, count, &attributes, &first, 1, stream));
        return;
    }
    std::size_t failed = 0;
    const auto call = reinterpret_cast<Batch12>(batch_);
    check("cuMemcpyBatchAsync",
          call(targets, sources, sizes, count, &attributes, &first, 1, &failed, stream));
}

void Driver::limit_batch_version(int version) {
    if (batch_version_ <= version) return;
    batch_ = version >= 12080 ? find("cuMemcpyBatchAsync", version) : nullptr;
    batch_version_ = batch_ == nullptr ? 0 : version;
}

int Driver::handle(int device) const {
    if (device < 0 || device >= num_devices_)
        throw Error("there is no CUDA device " + std::to_string(device) + ", only " +
                    std::to_string(num_devices_));
    int handle = 0;
    check("cuDeviceGet", calls_.device_get(&handle, device));
    return handle;
}

Context Driver::context(int device) const {
    const std::lock_guard<std::mutex> guard(contexts_mutex_);
    const auto found = contexts_.find(device);
    if (found != contexts_.end()) return found->second;
    Context context = nullptr;
    check("cuDevicePrimaryCtxRetain", calls_.context_retain(&context, handle(device)));
    contexts_[device] = context;
    return context;
}

int Driver::compute_capability(int device) const {
    int parts[2] = {};
    const int asked = handle(device);
    for (int i = 0; i < 2; ++i)  // attributes 75 and 76: major and minor
        check("cuDeviceGetAttribute", calls_.device_attribute(&parts[i], 75 + i, asked));
    return 10 * parts[0] + parts[1];
}

std::string Driver::pci_address(int device) const {
    char text[32] = {};
    check("cuDeviceGetPCIBusId", calls_.device_pci_address(text, sizeof(text) - 1, handle(device)));
    return text;
}

Current::Current(const Driver &driver, int device) : driver_(driver) {
    driver.check("cuCtxPushCurrent", driver().context_push(driver.context(device)));
    driver().exchange_capture_mode(&capture_mode_);
}

Current::~Current() {
    driver_().exchange_capture_mode(&capture_mode_);
    Context popped = nullptr;
    driver_().context_pop(&popped);
}

void register_host(const Driver &driver, int device, std::uintptr_t address, std::int64_t nbytes) {
    const Current current(driver, device);
    driver.check("cuMemHostRegister",
                 driver().host_register(reinterpret_cast<void *>(address),
                                        static_cast<std::size_t>(nbytes), kPortableMapped));
}

void unregister_host(const Driver &driver, int device, std::uintptr_t address) {
    const Current current(driver, device);
    driver.check("cuMemHostUnregister",
                 driver().host_unregister(reinterpret_cast<void *>(address)));
}

}  // namespace kvtiers::cuda
