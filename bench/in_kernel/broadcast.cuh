// The chain of broadcast.
#pragma once

#include "chains.cuh"

namespace in_kernel {

// Ranks take turns as root. A root sends the data that it received in the call before. Once a
// period the next root multiplies the data by the factor.
template <class T, int WORLD_SIZE>
class Broadcast {
  public:
    using Type = T;
    KCCL_DEVICE Broadcast(const DeviceComm& comm, const Data<T>& data)
        : channel_(block(), comm),
          slice_(kccl::mem::keep(data.x + data.first())),
          count_(kccl::mem::keep(data.length(data.first()))),
          factor_(data.factor) {}
    KCCL_DEVICE Status call() {
        const int root = root_;
        root_ = root_ + 1 < channel_.world_size() ? root_ + 1 : 0;
        return kccl::broadcast<T>(channel_, slice_, slice_, count_, root);
    }
    KCCL_DEVICE void between(uint32_t) {
        if (channel_.comm().rank == root_) multiply(slice_, count_, factor_);
    }

  private:
    kccl::Channel<Block, WORLD_SIZE> channel_;
    T* const slice_;
    const uint64_t count_;
    const double factor_;
    int root_ = 0;
};

}  // namespace in_kernel
