#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "bind.hpp"
#include "block_copier.hpp"

namespace nb = nanobind;

namespace {

nb::dict build_info() {
    nb::dict info;
#if defined(__clang__)
    info["compiler"] = "clang " __clang_version__;
#elif defined(__GNUC__)
    info["compiler"] = "gcc " __VERSION__;
#else
    info["compiler"] = "unknown";
#endif
    info["version"] = KVTIERS_VERSION;
    info["methods"] = kvtiers::available_methods();
    info["last_level_cache_nbytes"] = kvtiers::last_level_cache_nbytes();
    return info;
}

}  // namespace

NB_MODULE(_native, module) {
    // An engine that is torn down by signal leaves objects behind; that is no news for its users.
    nb::set_leak_warnings(false);
    module.doc() = "The compiled part of kvtiers: raw addresses and integers, no torch.";
    module.def("build_info", &build_info,
               "Return the compiler, the package's version, this CPU's copy methods and its cache.");
    kvtiers::bind_copier(module);
    kvtiers::bind_file_io(module);
    kvtiers::bind_pieces(module);
    kvtiers::bind_cuda(module);
}
