// The peer of grid_sync: grid.sync() of CUDA's cooperative groups, in the same kernel. The launch
// is cooperative. The macro keeps cooperative_groups.h from including headers of other libraries,
// which define the integer types differently than platform.cuh.
#pragma once

#define _CG_LIMIT_INCLUDED_DEPENDENCIES
#include <cooperative_groups.h>

#include "chains.cuh"

namespace in_kernel {

class Cooperative {
  public:
    static constexpr bool kOrders = true;
    static constexpr Scope kScope = Scope::kDevice;
    KCCL_DEVICE Status call() {
        grid_.sync();
        return kKcclOk;
    }
    KCCL_DEVICE uint32_t participants() const { return kccl::platform::blocks_per_grid(); }
    KCCL_DEVICE uint32_t own() const { return kccl::platform::block_in_grid(); }

  private:
    cooperative_groups::grid_group grid_ = cooperative_groups::this_grid();
};

template <Notes NOTES>
KCCL_KERNEL void barriers_cooperative(uint32_t warmup, uint32_t calls, uint32_t checked,
                                      uint32_t* const* boards, uint32_t num_boards,
                                      uint32_t own_board, uint32_t number, const uint32_t* delays,
                                      uint64_t delay_stride, uint64_t* times, uint32_t* late) {
    Cooperative barrier;
    make_barriers<Cooperative, NOTES>(barrier, warmup, calls, checked, boards, num_boards,
                                      own_board, number, delays, delay_stride, times, late);
}

}  // namespace in_kernel
