// Takes weights from the ring in shared memory into which the producer warp copies them ahead
// (stream.cuh). This suits machines whose copies to shared memory need no registers.
#pragma once

#include "shared.cuh"

namespace kccl::decode {

// weights.cuh says what the functions do. These waits have no timeout, because they end: the
// producer warp copies until the consumer warps have ended, and copies wait for nobody.
template <class S>
class RingWeights {
  public:
    KCCL_DECODE RingWeights(const DeviceComm& comm, const Task&, Shared<S>& shared)
        : asked_(&shared.asked), stages_(shared.ring, comm) {}

    KCCL_DECODE void begin_token_step(bool) {}

    // In a kernel where nothing overlaps, a stage is copied only when await() has asked for it. So
    // this returns false there.
    template <class F>
    KCCL_DECODE bool try_await(uint32_t warp_index) {
        const uint8_t* const stage = S::kOverlaps ? stages_.try_front() : nullptr;
        if (stage == nullptr) return false;
        stage_ = stage + warp_index * kStripBytes<F>;
        return true;
    }

    // In a kernel where nothing overlaps, first asks for the stage. It is copied when all warps
    // have asked.
    template <class F>
    KCCL_DECODE void await(uint32_t warp_index) {
        if constexpr (!S::kOverlaps) arrive_together(asked_);
        stage_ = stages_.await_front() + warp_index * kStripBytes<F>;
    }

    template <class F, class Lane>
    KCCL_DECODE Strip<F> strip(const Lane& lane, uint32_t i) const {
        return load_strip<F>(lane, stage_ + i * S::kWarps * kStripBytes<F>);
    }

    KCCL_DECODE void has_copied() { stages_.pop(); }

    KCCL_DECODE void skip(uint32_t) {
        await<typename S::Formats::First>(0);
        has_copied();
    }

  private:
    mem::CopyBarrier* const asked_;
    Consumer<WeightRing<S>> stages_;
    const uint8_t* stage_ = nullptr;
};

}  // namespace kccl::decode
