// The calls of grid_sync. Its peer is in cooperative.cuh.
#pragma once

#include "chains.cuh"

namespace in_kernel {

// A barrier of all blocks of a GPU, which share a board (see chains.cuh).
template <Order ORDER>
class GridSync {
  public:
    static constexpr bool kOrders = ORDER == Order::kAcqRel;
    static constexpr Scope kScope = Scope::kDevice;
    KCCL_DEVICE explicit GridSync(const DeviceComm& comm) : barrier_(comm) {}
    KCCL_DEVICE Status call() { return barrier_.template sync<ORDER>(); }
    KCCL_DEVICE uint32_t participants() const { return kccl::platform::blocks_per_grid(); }
    KCCL_DEVICE uint32_t own() const { return kccl::platform::block_in_grid(); }

  private:
    kccl::GridBarrier barrier_;
};

}  // namespace in_kernel
