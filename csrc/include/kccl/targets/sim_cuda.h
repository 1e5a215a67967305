// CUDA's words for kernels that the simulator runs: qualifiers, indices and dimensions of one
// dimension, and the syncs of blocks and warps. So a kernel that uses only these and KCCL compiles
// for both. Block-shared memory has another word: KCCL_BLOCK_SHARED or platform::dynamic_shared().
#pragma once

#include <stdint.h>

namespace kccl::sim {

struct Dimensions {
    uint32_t x, y, z;
};

}  // namespace kccl::sim

#define __global__ inline
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ \
    _Pragma("GCC error \"in the simulator use KCCL_BLOCK_SHARED or platform::dynamic_shared()\"")

#define threadIdx (::kccl::sim::Dimensions{::kccl::platform::thread_in_block(), 0, 0})
#define blockIdx (::kccl::sim::Dimensions{::kccl::platform::block_in_grid(), 0, 0})
#define blockDim (::kccl::sim::Dimensions{::kccl::platform::threads_per_block(), 1, 1})
#define gridDim (::kccl::sim::Dimensions{::kccl::platform::blocks_per_grid(), 1, 1})
#define warpSize (static_cast<int>(::kccl::platform::kWarpSize))
#define __syncthreads() ::kccl::platform::sync_block()
#define __syncwarp() ::kccl::platform::sync_warp()
