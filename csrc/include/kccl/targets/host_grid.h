// The position of a block of the host target in its grid. A call of the library has one block. In
// kernels that kccl.compile(target="host") compiles, with KCCL_HOST_GRID, each block of a launch is
// an OS thread.
#pragma once

#include <stdint.h>

namespace kccl::host {

#if defined(KCCL_HOST_GRID)
struct BlockPlace {
    uint32_t block = 0, num_blocks = 1;
};
inline thread_local BlockPlace own_block;
KCCL_ALWAYS_INLINE uint32_t block_in_grid() { return own_block.block; }
KCCL_ALWAYS_INLINE uint32_t blocks_per_grid() { return own_block.num_blocks; }
#else
KCCL_ALWAYS_INLINE uint32_t block_in_grid() { return 0; }
KCCL_ALWAYS_INLINE uint32_t blocks_per_grid() { return 1; }
#endif

}  // namespace kccl::host
