// Takes weights from the ring in shared memory in a mixture of experts, where stages are not used
// in the order in which they are copied (pool_order.cuh).
#pragma once

#include "pool_order.cuh"
#include "shared.cuh"

namespace kccl::decode {

// Returns how many stages are parked while the experts of a layer are copied: the first ones of the
// next layer or, in the last layer, of the head if the token step has one.
template <class S>
KCCL_DECODE uint32_t num_parked(uint32_t block, uint32_t layer, bool has_head) {
    using Qkv = typename Shape<S>::Qkv;
    using Head = typename Shape<S>::Head;
    static_assert(num_stages<S>() > 1, "the experts need a slot, too");
    constexpr uint32_t kMost = S::kOverlaps ? least_of(S::kParked, num_stages<S>() - 1) : 0;
    uint32_t stages = 0;
    if (layer + 1 < S::kNumLayers) {
        const uint32_t tiles = Qkv::tiles_of(Shape<S>::block_in_group_of(block)).num;
        stages = ceil_div(tiles * Qkv::kAllSteps, Qkv::kStageSteps);
    } else if (has_head) {
        const uint32_t tiles = least_of(Shape<S>::head_tiles_of(block).num, S::kHeadTiles);
        stages = ceil_div(tiles * Head::kAllSteps, Head::kStageSteps);
    }
    return least_of(stages, kMost);
}

// weights.cuh says what the functions do.
template <class S>
class PoolWeights {
  public:
    KCCL_DECODE PoolWeights(const DeviceComm&, const Task&, Shared<S>& shared)
        : asked_(&shared.asked), ring_(shared.ring) {}

    KCCL_DECODE void begin_token_step(bool has_head) { has_head_ = has_head; }

    KCCL_DECODE void begin_product(uint32_t block, uint32_t layer, Product<S> product) {
        if (product == Product<S>::kExpertGateUp) {
            order_.begin_experts(num_parked<S>(block, layer, has_head_));
        }
    }
    KCCL_DECODE void end_product(Product<S> product) {
        if (product == Product<S>::kExpertDown) order_.end_experts();
    }

    template <class F>
    KCCL_DECODE bool try_await(uint32_t warp_index) {
        const bool is_here =
            S::kOverlaps && mem::has_completed_now(&ring_.full[order_.slot()], order_.parity());
        if (platform::warp_any(!is_here)) return false;
        stage_ = ring_.stage[order_.slot()] + warp_index * kStripBytes<F>;
        return true;
    }

    template <class F>
    KCCL_DECODE void await(uint32_t warp_index) {
        await();
        stage_ = ring_.stage[order_.slot()] + warp_index * kStripBytes<F>;
    }

    template <class F, class Lane>
    KCCL_DECODE Strip<F> strip(const Lane& lane, uint32_t i) const {
        return load_strip<F>(lane, stage_ + i * S::kWarps * kStripBytes<F>);
    }

    KCCL_DECODE void has_copied() {
        arrive_together(&ring_.empty[order_.slot()]);
        order_.advance();
    }

    KCCL_DECODE void skip(uint32_t) {
        await();
        has_copied();
    }

  private:
    KCCL_DECODE void await() {
        if constexpr (!S::kOverlaps) arrive_together(asked_);
        const mem::CopyBarrier* const full = &ring_.full[order_.slot()];
        while (platform::warp_any(!mem::has_completed(full, order_.parity()))) mem::poll_pause();
    }

    mem::CopyBarrier* const asked_;
    WeightRing<S>& ring_;
    PoolOrder<num_stages<S>()> order_;
    const uint8_t* stage_ = nullptr;
    bool has_head_ = false;
};

}  // namespace kccl::decode
