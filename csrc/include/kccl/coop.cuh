// A coop is the threads that make a call together: one thread, or all threads of a warp or a block.
// A function that takes a coop must be called by all its threads, with the same arguments.
//
//   index() < size()   this thread's number in the coop
//   sync()             a barrier of the coop's threads; orders their memory accesses
//   any(mine)          true if the argument is true in any thread of the coop; also a sync
#pragma once

#include "mem.cuh"

namespace kccl {

struct Thread {
    KCCL_DEVICE uint32_t index() const { return 0; }
    KCCL_DEVICE uint32_t size() const { return 1; }
    KCCL_DEVICE void sync() const {}
    KCCL_DEVICE bool any(bool mine) const { return mine; }
};

struct Warp {
    KCCL_DEVICE uint32_t index() const { return platform::thread_in_block() % platform::kWarpSize; }
    KCCL_DEVICE uint32_t size() const { return platform::kWarpSize; }
    KCCL_DEVICE void sync() const { platform::sync_warp(); }
    KCCL_DEVICE bool any(bool mine) const {
        platform::sync_warp();
        return platform::warp_any(mine);
    }
};

struct Block {
    KCCL_DEVICE uint32_t index() const { return platform::thread_in_block(); }
    KCCL_DEVICE uint32_t size() const { return platform::threads_per_block(); }
    KCCL_DEVICE void sync() const { platform::sync_block(); }
    KCCL_DEVICE bool any(bool mine) const { return platform::sync_block_any(mine); }
};

KCCL_DEVICE Thread thread() { return {}; }
KCCL_DEVICE Warp warp() { return {}; }
KCCL_DEVICE Block block() { return {}; }

// Returns the coop's index among all coops of its kind in the grid. A call that gets no channel
// uses the channel of this number.
KCCL_DEVICE int default_channel(Block) { return platform::block_in_grid(); }
KCCL_DEVICE int default_channel(Warp) {
    const uint32_t warps = platform::threads_per_block() / platform::kWarpSize;
    return platform::block_in_grid() * warps + platform::thread_in_block() / platform::kWarpSize;
}
KCCL_DEVICE int default_channel(Thread) {
    return platform::block_in_grid() * platform::threads_per_block() + platform::thread_in_block();
}

// Returns true in the one thread that acts for the coop.
template <class Coop>
KCCL_DEVICE bool leads(Coop coop) {
    return coop.index() == 0;
}

}  // namespace kccl
