// The calls of barrier.
#pragma once

#include "chains.cuh"

namespace in_kernel {

// A barrier of all ranks, with one block on each rank. Each rank has its own board (chains.cuh).
template <Order ORDER, int WORLD_SIZE>
class RankBarrier {
  public:
    static constexpr bool kOrders = ORDER == Order::kAcqRel;
    static constexpr Scope kScope = Scope::kSystem;
    KCCL_DEVICE explicit RankBarrier(const DeviceComm& comm) : channel_(block(), comm) {}
    KCCL_DEVICE Status call() { return kccl::barrier<ORDER>(channel_); }
    KCCL_DEVICE uint32_t participants() const { return channel_.world_size(); }
    KCCL_DEVICE uint32_t own() const { return channel_.comm().rank; }

  private:
    kccl::Channel<Block, WORLD_SIZE> channel_;
};

}  // namespace in_kernel
