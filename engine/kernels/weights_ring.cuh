// Weights that another warp copies ahead through a ring in block-shared memory: stream.cuh. For
// machines whose copies need no registers.
#pragma once

#include "shared.cuh"

namespace kccl::decode {

// See weights.cuh. Its waits have no limit: the producer copies until the warps that multiply have
// ended, and copies wait for nobody.
template <class S>
class RingWeights {
  public:
    using Unit = Mma<typename S::Weight>;

    KCCL_DEVICE RingWeights(const DeviceComm& comm, const Task&, Shared<S>& shared)
        : asked_(&shared.asked), stages_(shared.ring, comm) {}

    KCCL_DEVICE void begin_round(bool) {}

    // Nothing is there before it is asked for, where nothing overlaps.
    KCCL_DEVICE bool try_await(uint32_t warp_index) {
        const uint8_t* const stage = S::kOverlaps ? stages_.try_front() : nullptr;
        if (stage == nullptr) return false;
        stage_ = stage + warp_index * kTileBytes;
        return true;
    }

    // Where nothing overlaps, the stage is copied when all warps have asked for it.
    KCCL_DEVICE void await(uint32_t warp_index) {
        if constexpr (!S::kOverlaps) arrive_together(asked_);
        stage_ = stages_.await_front() + warp_index * kTileBytes;
    }

    KCCL_DEVICE typename Unit::Weights tile(const typename Unit::Lane& lane, uint32_t i) const {
        return lane.weights(stage_ + i * S::kWarps * kTileBytes);
    }

    KCCL_DEVICE void has_copied() { stages_.pop(); }

    KCCL_DEVICE void skip(uint32_t) {
        await(0);
        has_copied();
    }

  private:
    mem::CopyBarrier* const asked_;
    Consumer<WeightRing<S>> stages_;
    const uint8_t* stage_ = nullptr;
};

}  // namespace kccl::decode
