// What each source file adds to the module `kvtiers._native`.
#pragma once

#include <nanobind/nanobind.h>

namespace kvtiers {

void bind_copier(nanobind::module_ &module);
void bind_file_io(nanobind::module_ &module);
void bind_pieces(nanobind::module_ &module);
void bind_cuda(nanobind::module_ &module);

}  // namespace kvtiers
