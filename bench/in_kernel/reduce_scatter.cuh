// The chain of reduce_scatter.
#pragma once

#include "chains.cuh"

namespace in_kernel {

// A reduce_scatter in place: a rank's own chunk becomes the sum of all ranks' chunks for this rank.
// Once a period that chunk changes its sign. In untimed launches the chunks for the peers change
// their sign instead.
template <class T, int WORLD_SIZE>
class ReduceScatter {
  public:
    using Type = T;
    KCCL_DEVICE ReduceScatter(const DeviceComm& comm, const Data<T>& data)
        : channel_(block(), comm),
          in_(kccl::mem::keep(data.x + data.first())),
          own_(kccl::mem::keep(in_ + comm.rank * data.count)),
          count_(kccl::mem::keep(data.length(data.first()))),
          stride_(kccl::mem::keep(data.count)),
          factor_(data.factor),
          is_timed_(data.period >= kShortestTimed) {}
    KCCL_DEVICE Status call() {
        return kccl::reduce_scatter<T>(channel_, own_, in_, count_, stride_);
    }
    KCCL_DEVICE void between(uint32_t) {
        if (is_timed_) return multiply(own_, count_, factor_);
        for (int peer = 0; peer < channel_.world_size(); ++peer) {
            T* const chunk = in_ + peer * stride_;
            if (chunk != own_) multiply(chunk, count_, factor_);
        }
    }

  private:
    kccl::Channel<Block, WORLD_SIZE> channel_;
    T* const in_;
    T* const own_;
    const uint64_t count_;
    const uint64_t stride_;
    const double factor_;
    const bool is_timed_;
};

}  // namespace in_kernel
