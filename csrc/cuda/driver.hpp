// The CUDA driver, opened when it is first asked for; no CUDA header, no library to link.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

namespace kvtiers::cuda {

using Result = int;
using Address = unsigned long long;
using Context = void *;
using Stream = void *;
using Event = void *;
using Module = void *;
using Function = void *;

constexpr Result kNotReady = 600;

// A call that the driver refused; names the call, the error and its number.
class Error : public std::runtime_error {
  public:
    using std::runtime_error::runtime_error;
};

// As `cuMemcpyBatchAsync` takes it: 24 bytes, the same for drivers 12.8 and 13.
struct CopyAttributes {
    int source_access_order;  // 1: in the order of the stream
    int source_hint[2];
    int target_hint[2];
    unsigned flags;
};
static_assert(sizeof(CopyAttributes) == 24, "another layout than the driver's");

// What is called, with the driver's own signatures; all of them return an error number.
struct Calls {
    Result (*init)(unsigned);
    Result (*get_error_name)(Result, const char **);
    Result (*device_count)(int *);
    Result (*device_get)(int *, int);
    Result (*device_attribute)(int *, int, int);
    Result (*device_pci_address)(char *, int, int);
    Result (*context_retain)(Context *, int);
    Result (*context_push)(Context);
    Result (*context_pop)(Context *);
    Result (*exchange_capture_mode)(int *);
    Result (*stream_create)(Stream *, unsigned);
    Result (*stream_destroy)(Stream);
    Result (*stream_synchronize)(Stream);
    Result (*stream_wait)(Stream, Event, unsigned);
    Result (*stream_is_capturing)(Stream, int *);
    Result (*event_create)(Event *, unsigned);
    Result (*event_destroy)(Event);
    Result (*event_record)(Event, Stream);
    Result (*event_query)(Event);
    Result (*event_synchronize)(Event);
    Result (*event_elapsed)(float *, Event, Event);
    Result (*alloc)(Address *, std::size_t);
    Result (*free)(Address);
    Result (*host_register)(void *, std::size_t, unsigned);
    Result (*host_unregister)(void *);
    Result (*module_load)(Module *, const void *);
    Result (*module_unload)(Module);
    Result (*module_function)(Function *, Module, const char *);
    Result (*launch)(Function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                     unsigned, Stream, void **, void **);
    Result (*upload)(Address, const void *, std::size_t);
    Result (*copy)(Address, Address, std::size_t, Stream);
};

class Driver {
  public:
    // Throws Error where the library is missing, older than 12.0, or finds no device.
    explicit Driver(const std::string &library);

    // Of CUDA, as the driver states it: 13000 is 13.0.
    int version() const { return version_; }
    int num_devices() const { return num_devices_; }

    // How the driver's calls name a device. Throws Error where there is no such device.
    int handle(int device) const;

    // 90 is 9.0. Throws Error.
    int compute_capability(int device) const;

    // Where it is plugged in, as "0000:3B:00.0". Throws Error.
    std::string pci_address(int device) const;

    // Which call copies a batch: 13000, 12080, or 0 for one call a copy.
    int batch_version() const { return batch_version_; }

    // A device's primary context, which is the engine's. Once asked for it is held for good: what
    // was made or registered in it must not go with the engine's own hold on it.
    // Throws Error where there is no such device.
    Context context(int device) const;

    const Calls &operator()() const { return calls_; }

    // Throws Error if `result` is one.
    void check(const char *call, Result result) const;

    // Queues `count` copies. Throws Error; some may then be queued.
    void copy_batch(Address *targets, Address *sources, std::size_t *sizes, std::size_t count,
                    Stream stream) const;

    // Does as if the driver were of another version where that takes fewer calls.
    void limit_batch_version(int version);

  private:
    void *find(const char *name, int version) const;
    std::string explain(const char *call, Result result) const;

    Calls calls_{};
    Result (*get_proc_address_)(const char *, void **, int, std::uint64_t, int *) = nullptr;
    void *batch_ = nullptr;
    int version_ = 0;
    int batch_version_ = 0;
    int num_devices_ = 0;
    mutable std::mutex contexts_mutex_;
    mutable std::map<int, Context> contexts_;
};

// Makes the context current on this thread while it lives, and leaves no trace. Calls that a
// stream capture on another thread would forbid are allowed: they are no part of it.
class Current {
  public:
    Current(const Driver &driver, int device);
    ~Current();
    Current(const Current &) = delete;
    Current &operator=(const Current &) = delete;

  private:
    const Driver &driver_;
    int capture_mode_ = 2;  // relaxed
};

// Page-locks memory for a device, mapped into its address space. Throws Error.
void register_host(const Driver &driver, int device, std::uintptr_t address, std::int64_t nbytes);
void unregister_host(const Driver &driver, int device, std::uintptr_t address);

}  // namespace kvtiers::cuda
