// The chain of all_to_all.
#pragma once

#include "chains.cuh"

namespace in_kernel {

// An all_to_all in place. Each call sends the data that the call before received, so two calls move
// every chunk back. Once a period a rank multiplies all of its data by its factor, 1 or -1.
template <class T, int WORLD_SIZE>
class AllToAll {
  public:
    using Type = T;
    KCCL_DEVICE AllToAll(const DeviceComm& comm, const Data<T>& data)
        : channel_(block(), comm),
          slice_(kccl::mem::keep(data.x + data.first())),
          count_(kccl::mem::keep(data.length(data.first()))),
          stride_(kccl::mem::keep(data.count)),
          factor_(data.factor) {}
    KCCL_DEVICE Status call() {
        return kccl::all_to_all<T>(channel_, slice_, slice_, count_, stride_);
    }
    KCCL_DEVICE void between(uint32_t) {
        for (int peer = 0; peer < channel_.world_size(); ++peer) {
            multiply(slice_ + peer * stride_, count_, factor_);
        }
    }

  private:
    kccl::Channel<Block, WORLD_SIZE> channel_;
    T* const slice_;
    const uint64_t count_;
    const uint64_t stride_;
    const double factor_;
};

}  // namespace in_kernel
