// The chains of all_reduce: by a channel, and by an exchange (exchange.cuh).
#pragma once

#include "chains.cuh"
#include "exchange.cuh"

namespace in_kernel {

// A slice-complete all_reduce: after a call a block may use only its own slice of the result. In
// each call a block reduces the same slice.
template <class T, int WORLD_SIZE>
class AllReduceSlices {
  public:
    using Type = T;
    KCCL_DEVICE AllReduceSlices(const DeviceComm& comm, const Data<T>& data)
        : channel_(block(), comm),
          slice_(kccl::mem::keep(data.x + data.first())),
          count_(kccl::mem::keep(data.length(data.first()))),
          factor_(data.factor) {}
    KCCL_DEVICE Status call() { return kccl::all_reduce<T>(channel_, slice_, slice_, count_); }
    KCCL_DEVICE void between(uint32_t) { multiply(slice_, count_, factor_); }

  private:
    kccl::Channel<Block, WORLD_SIZE> channel_;
    T* const slice_;
    const uint64_t count_;
    const double factor_;
};

// A message-complete all_reduce: after a call a block may use the whole result, because the blocks
// of the GPU sync. In each call a block reduces the slice that another block reduced in the call
// before.
template <class T, int WORLD_SIZE>
class AllReduceMessage {
  public:
    using Type = T;
    KCCL_DEVICE AllReduceMessage(const DeviceComm& comm, const Data<T>& data)
        : channel_(block(), comm), blocks_(comm), data_(data), begin_(data.first()) {}
    KCCL_DEVICE Status call() {
        T* const slice = data_.x + begin_;
        const Status status = kccl::all_reduce<T>(channel_, slice, slice, data_.length(begin_));
        begin_ = begin_ + data_.each < data_.count ? begin_ + data_.each : 0;
        return status != kKcclOk ? status : blocks_.sync();
    }
    KCCL_DEVICE void between(uint32_t) {
        multiply(data_.x + begin_, data_.length(begin_), data_.factor);
    }

  private:
    kccl::Channel<Block, WORLD_SIZE> channel_;
    kccl::GridBarrier blocks_;
    const Data<T> data_;
    uint64_t begin_;
};

}  // namespace in_kernel
