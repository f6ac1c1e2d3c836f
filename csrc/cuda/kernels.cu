// Gather and scatter: blocks to slots and back, a few thread blocks over the whole batch.
#include "block_index.h"

namespace kvtiers {
namespace kernel {

template <bool gather>
__device__ __forceinline__ void run(const Batch &batch) {
    const i64 warps_per_block = kThreads / kLanes;
    const i64 warp = static_cast<i64>(blockIdx.x) * warps_per_block + threadIdx.x / kLanes;
    copy_share<gather>(batch, warp, gridDim.x * warps_per_block, threadIdx.x % kLanes);
}

}  // namespace kernel
}  // namespace kvtiers

extern "C" __global__ void __launch_bounds__(kvtiers::kernel::kThreads, 1)
    kvtiers_gather(const __grid_constant__ kvtiers::kernel::Batch batch) {
    kvtiers::kernel::run<true>(batch);
}

extern "C" __global__ void __launch_bounds__(kvtiers::kernel::kThreads, 1)
    kvtiers_scatter(const __grid_constant__ kvtiers::kernel::Batch batch) {
    kvtiers::kernel::run<false>(batch);
}
