// The chain of all_gather.
#pragma once

#include "chains.cuh"

namespace in_kernel {

// Calls alternate: one gathers from `x` into `out`, the next from `out` into `x`. In call k each
// rank sends its own chunk of what it received or, if bit k % 64 of `shifts` is set, the next
// rank's chunk. So the chunks move between ranks, and a stale chunk differs from the new one.
template <class T, int WORLD_SIZE>
class AllGather {
  public:
    using Type = T;
    KCCL_DEVICE AllGather(const DeviceComm& comm, const Data<T>& data)
        : channel_(block(), comm),
          from_(kccl::mem::keep(data.x + data.first())),
          to_(kccl::mem::keep(data.out + data.first())),
          own_(kccl::mem::keep(comm.rank * data.count)),
          next_(kccl::mem::keep((comm.rank + 1) % comm.world_size * data.count)),
          count_(kccl::mem::keep(data.length(data.first()))),
          stride_(kccl::mem::keep(data.count)),
          shifts_(kccl::mem::keep(data.shifts)) {}
    KCCL_DEVICE Status call() {
        const T* const chunk = from_ + ((shifts_ & 1) != 0 ? next_ : own_);
        const Status status = kccl::all_gather<T>(channel_, to_, chunk, count_, stride_);
        shifts_ = shifts_ >> 1 | shifts_ << 63;
        T* const before = from_;
        from_ = to_;
        to_ = before;
        return status;
    }
    KCCL_DEVICE void between(uint32_t) {}

  private:
    kccl::Channel<Block, WORLD_SIZE> channel_;
    T* from_;
    T* to_;
    const uint64_t own_;
    const uint64_t next_;
    const uint64_t count_;
    const uint64_t stride_;
    uint64_t shifts_;
};

}  // namespace in_kernel
