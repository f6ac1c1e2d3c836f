#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>

#include <memory>
#include <string>

#include "../host/bind.hpp"
#include "../host/bind_types.hpp"
#include "device_copier.hpp"

namespace nb = nanobind;

namespace kvtiers {
namespace {

using cuda::DeviceCopier;
using cuda::Driver;
using cuda::Route;

void construct(DeviceCopier *self, std::shared_ptr<Driver> driver, int device,
               const std::vector<MemoryArguments> &allocations,
               const std::vector<GroupArguments> &groups, const MemoryArguments &slab,
               std::int64_t slot_nbytes, const nb::bytes &kernels, int num_thread_blocks,
               std::int64_t staging_nbytes, std::int64_t tile_nbytes, int num_markers) {
    new (self) DeviceCopier(
        std::move(driver), device, memories_of(allocations), groups_of(groups),
        {slab.first, slab.second, slot_nbytes}, std::string(kernels.c_str(), kernels.size()),
        {num_thread_blocks, staging_nbytes, tile_nbytes, num_markers});
}

std::int64_t submit(DeviceCopier &self, bool gather, std::int64_t group, const Int64s &block_ids,
                    const Int64s &slots, std::int64_t after, Route route) {
    const auto blocks = column_of(block_ids);
    const auto places = column_of(slots);
    const nb::gil_scoped_release release;
    return self.submit(gather ? Direction::gather : Direction::scatter, group, blocks, places,
                       after, route);
}

void bind_driver(nb::module_ &module) {
    nb::class_<Driver>(module, "CudaDriver",
                       "The CUDA driver library, opened by this.\n\n"
                       "Raises CudaError where it is missing, older than 12.0 or finds no device.")
        .def(nb::init<const std::string &>(), nb::arg("library") = "libcuda.so.1")
        .def_prop_ro("version", &Driver::version, "Of CUDA: 13000 is 13.0.")
        .def_prop_ro("num_devices", &Driver::num_devices)
        .def_prop_ro("batch_version", &Driver::batch_version,
                     "Which call copies a batch: 13000, 12080, or 0 for one call a copy.")
        .def("compute_capability", &Driver::compute_capability, nb::arg("device"),
             "Of a device: 90 is 9.0. Raises CudaError.")
        .def("pci_address", &Driver::pci_address, nb::arg("device"),
             "Where a device is plugged in, as 0000:3B:00.0. Raises CudaError.")
        .def("limit_batch_version", &Driver::limit_batch_version, nb::arg("version"),
             "Copy as with a driver of this version; for measurements.")
        .def(
            "register_host",
            [](const Driver &self, int device, std::uintptr_t address, std::int64_t nbytes) {
                cuda::register_host(self, device, address, nbytes);
            },
            nb::arg("device"), nb::arg("address"), nb::arg("nbytes"),
            nb::call_guard<nb::gil_scoped_release>(),
            "Page-lock memory and map it for the device. Raises CudaError.")
        .def(
            "unregister_host",
            [](const Driver &self, int device, std::uintptr_t address) {
                cuda::unregister_host(self, device, address);
            },
            nb::arg("device"), nb::arg("address"), nb::call_guard<nb::gil_scoped_release>(),
            "Release what `register_host` locked at this address. Raises CudaError.");
}

}  // namespace

void bind_cuda(nb::module_ &module) {
    nb::exception<cuda::Error>(module, "CudaError", PyExc_RuntimeError);
    bind_driver(module);
    nb::enum_<Route>(module, "Route", "How a batch crosses between device and host.")
        .value("DMA", Route::dma, "One copy by the copy engines for every piece.")
        .value("DIRECT", Route::direct, "A kernel reads and writes the slots.")
        .value("STAGED", Route::staged, "A kernel to or from a buffer, one copy a payload.");
    nb::class_<DeviceCopier>(
        module, "DeviceCopier",
        "Copies payloads between engine blocks on a device and page-locked slots.\n\n"
        "allocations, groups, slab: as of `HostCopier`. kernels: a fatbin, or empty: then every\n"
        "route is DMA. num_thread_blocks: of a kernel. staging_nbytes: a direction.\n"
        "tile_nbytes: that a warp copies at a time. num_markers: that keep an event.\n"
        "Raises ValueError where things do not fit together, CudaError where the driver refuses.")
        .def("__init__", &construct, nb::arg("driver"), nb::arg("device"), nb::arg("allocations"),
             nb::arg("groups"), nb::arg("slab"), nb::arg("slot_nbytes"), nb::arg("kernels"),
             nb::arg("num_thread_blocks"), nb::arg("staging_nbytes"), nb::arg("tile_nbytes"),
             nb::arg("num_markers"))
        .def_prop_ro("has_kernels", &DeviceCopier::has_kernels)
        .def("mark", &DeviceCopier::mark, nb::arg("stream"),
             nb::call_guard<nb::gil_scoped_release>(),
             "Record a point of an engine's stream. Raises CudaError, also during a capture.")
        .def("submit", &submit, nb::arg("gather"), nb::arg("group"),
             nb::arg("block_ids").noconvert(), nb::arg("slots").noconvert(), nb::arg("after"),
             nb::arg("route"),
             "Queue a batch behind a marker, 0 for none; return its ticket. Raises ValueError\n"
             "with the row, IndexError for an unknown marker, CudaError where refused.")
        .def("done", &DeviceCopier::done, nb::arg("ticket"),
             nb::call_guard<nb::gil_scoped_release>(),
             "Seconds that a batch took behind its marker; None while it runs. Being over consumes\n"
             "it; so does CudaError. Raises IndexError.")
        .def("wait", &DeviceCopier::wait, nb::arg("ticket"),
             nb::call_guard<nb::gil_scoped_release>(), "Block until a batch is over.")
        .def("close", &DeviceCopier::close, nb::call_guard<nb::gil_scoped_release>(),
             "Wait and release; return what failed meanwhile, or an empty string.");
}

}  // namespace kvtiers
