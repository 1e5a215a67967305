// The ops of a mixture of experts: the router's logits, the activations of the chosen experts, and
// what their last product multiplies. expert_shape.cuh has their sizes.
#pragma once

#include "gate_up.cuh"
#include "routing.cuh"

namespace kccl::decode {

// Publishes the logits of the block's rows of the router. Called by all consumer warps, when they
// have met after the product.
template <class S>
KCCL_DECODE void finish_router(ConsumerWarp<S>& consumer, uint32_t layer) {
    using M = typename Shape<S>::Router;
    const Cut tiles = M::tiles_of(consumer.block_in_group());
    const float inverse = inverse_rms(consumer);
    for (uint32_t k = 0; k < ceil_div(M::kMostTiles * kTileFloat4s, Shape<S>::kConsumerThreads);
         ++k) {
        const uint32_t index4 = own_float4(consumer, k);
        if (index4 >= tiles.num * kTileFloat4s) break;
        const uint32_t row = tiles.first * kTileFloat4s + index4;
        const Float4 logits =
            scaled<S>(consumer.task(), Product<S>::kRouter, layer, row,
                      total_of(consumer, index4 / kTileFloat4s, index4 % kTileFloat4s), inverse);
        consumer.publish(Slots<S>::routed(layer) + row, logits);
    }
    consumer.end_op();
}

// Returns silu(gate) * up or, if the model has a limit, what gpt-oss computes instead
// (ModelConfig.swiglu_limit). NaN stays NaN.
template <class S>
KCCL_DECODE float activated(float gate, float up) {
    if constexpr (S::kSwigluLimit == 0) {
        return silu(gate) * up;
    } else {
        constexpr float kSwish = 1.702f;
        gate = gate > S::kSwigluLimit ? S::kSwigluLimit : gate;
        up = up > S::kSwigluLimit ? S::kSwigluLimit : up < -S::kSwigluLimit ? -S::kSwigluLimit : up;
        return gate * reciprocal(1.0f + exponential(-kSwish * gate)) * (up + 1.0f);
    }
}

// Publishes the block's activations of the chosen experts, which are not yet multiplied by the
// experts' shares. Called as publish_acts().
template <class S>
KCCL_DECODE void finish_expert_acts(ConsumerWarp<S>& consumer, uint32_t layer) {
    await_expert_biases(consumer, layer);
    publish_acts<typename Shape<S>::ExpertGateUp>(
        consumer, layer,
        [&](uint32_t tile, uint32_t i, const Float4& gate_sums, const Float4& up_sums,
            float inverse) {
            const Float4 gate = scaled_by_expert(consumer, tile, i, gate_sums, inverse);
            const Float4 up =
                scaled_by_expert(consumer, tile, i + kTileFloat4s / 2, up_sums, inverse);
            Float4 act;
            KCCL_UNROLL
            for (int j = 0; j < 4; ++j) act.value[j] = activated<S>(gate.value[j], up.value[j]);
            return act;
        });
}

// Waits for this warp's part of the activations of each of the lane group's lanes and of each
// chosen expert, multiplies them by the expert's share, and stages them. All warps must have met
// since the choice was written.
//
// A thread has so many of them that it gets a few at a time. Otherwise polled packets are spilled,
// and each load waits for the one before it (bench/LOG.md).
template <class S>
KCCL_DECODE void stage_expert_acts(ConsumerWarp<S>& consumer, uint32_t layer) {
    using M = typename Shape<S>::ExpertDown;
    constexpr uint32_t kOfPlace = M::kEach * kTileFloat4s, kAll = M::kFloat4s * M::kLanes;
    constexpr uint32_t kEach = ceil_div(kAll, platform::kWarpSize);
    constexpr uint32_t kAtOnce = least_of(kEach, 4);
#pragma unroll 1
    for (uint32_t first = 0; first < kEach; first += kAtOnce) {
        Float4 float4s[kAtOnce];
        uint32_t slots[kAtOnce], wanted = 0;
        KCCL_UNROLL
        for (uint32_t k = 0; k < kAtOnce; ++k) {
            const uint32_t at = consumer.thread() + (first + k) * platform::kWarpSize;
            const uint32_t lane = at / M::kFloat4s, place = at / kOfPlace % S::kPlaces;
            const uint32_t i = consumer.warp_index() * kOfPlace + at % kOfPlace;
            const bool is_there = at < kAll && i < S::kFfn / 4;
            wanted |= is_there ? 1u << k : 0;
            slots[k] = is_there ? Slots<S>::act(layer, consumer.first_lane() + lane) +
                                      place * (S::kFfn / 4) + i
                                : 0;
        }
        consumer.template await<mem::Scope::kDevice>(slots, wanted, tag_of(consumer.token_step()),
                                                     float4s, 0, first == 0);
        KCCL_UNROLL
        for (uint32_t k = 0; k < kAtOnce; ++k) {
            const uint32_t at = consumer.thread() + (first + k) * platform::kWarpSize;
            if (at >= kAll) continue;
            const uint32_t place = at / kOfPlace % S::kPlaces;
            const float share = mem::load_plain(&consumer.shared().choice.share[place]);
            for (float& value : float4s[k].value) value = rounded_product(value, share);
            stage<M>(consumer, at, float4s[k]);
        }
    }
}

}  // namespace kccl::decode
