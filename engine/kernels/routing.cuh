// Chooses the experts of a position. Each block does this for itself, from the same logits, so that
// all of them know the choice after one exchange.
#pragma once

#include "choose_experts.cuh"
#include "expert_biases.cuh"

namespace kccl::decode {

// Waits for the router's logits of a layer, chooses, and lets the producer warp copy the experts'
// weights. If the wait has failed, the logits are 0: some experts are chosen, so that other warps'
// waits for weights end. Called by all threads of warp 0.
template <class S>
KCCL_DECODE void route(ConsumerWarp<S>& consumer, uint32_t layer) {
    constexpr uint32_t kFloat4s = kRouterRows<S> / 4;
    constexpr uint32_t kEach = ceil_div(kFloat4s, platform::kWarpSize);
    Float4 float4s[kEach];
    uint32_t slots[kEach], wanted = 0;
    KCCL_UNROLL
    for (uint32_t k = 0; k < kEach; ++k) {
        const uint32_t i = consumer.thread() + k * platform::kWarpSize;
        wanted |= i < kFloat4s ? 1u << k : 0;
        slots[k] = Slots<S>::routed(layer) + (i < kFloat4s ? i : 0);
    }
    consumer.template await<mem::Scope::kDevice>(slots, wanted, tag_of(consumer.token_step()),
                                                 float4s);
    choose_experts(float4s, &consumer.shared().choice);
    arrive_together(&consumer.shared().has_chosen);
}

}  // namespace kccl::decode
