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
template <class S>
KCCL_DECODE void stage_expert_acts(ConsumerWarp<S>& consumer, uint32_t layer) {
    using M = typename Shape<S>::ExpertDown;
    constexpr uint32_t kOfPlace = M::kEach * kTileFloat4s, kAll = M::kFloat4s * M::kLanes;
    constexpr uint32_t kEach = ceil_div(kAll, platform::kWarpSize);
    // A thread gets four float4s at a time. To get all of them at once takes longer (bench/LOG.md).
    constexpr uint32_t kAtOnce = least_of(kEach, 4);
    // If the float4s of a place (a chosen expert) are a multiple of the warp's threads, all threads
    // have the same place in a turn, which is known when the kernel is compiled.
    constexpr uint32_t kTurns = kOfPlace / platform::kWarpSize;
    constexpr bool kAreWhole = kOfPlace % platform::kWarpSize == 0;
    struct At {
        uint32_t all, place, in_place;
    };
    const auto at_of = [&](uint32_t k) -> At {
        const uint32_t all = consumer.thread() + k * platform::kWarpSize;
        if constexpr (kAreWhole) {
            return {all, k / kTurns % S::kPlaces,
                    k % kTurns * platform::kWarpSize + consumer.thread()};
        } else {
            return {all, all / kOfPlace % S::kPlaces, all % kOfPlace};
        }
    };
#pragma unroll 1
    for (uint32_t first = 0; first < kEach; first += kAtOnce) {
        Float4 float4s[kAtOnce];
        uint32_t slots[kAtOnce], wanted = 0;
        KCCL_UNROLL
        for (uint32_t k = 0; k < kAtOnce; ++k) {
            const At at = at_of(first + k);
            const uint32_t lane = at.all / M::kFloat4s;
            const uint32_t i = consumer.warp_index() * kOfPlace + at.in_place;
            const bool is_there = at.all < kAll && i < S::kFfn / 4;
            wanted |= is_there ? 1u << k : 0;
            slots[k] = is_there ? Slots<S>::act(layer, consumer.first_lane() + lane) +
                                      at.place * (S::kFfn / 4) + i
                                : 0;
        }
        // With a ring no scout goes before: the last activations come at about the same time.
        consumer.template await<mem::Scope::kDevice, S::kWeightsInRegisters>(
            slots, wanted, tag_of(consumer.token_step()), float4s, 0, first == 0);
        KCCL_UNROLL
        for (uint32_t k = 0; k < kAtOnce; ++k) {
            const At at = at_of(first + k);
            if (at.all >= kAll) continue;
            const float share = mem::load_plain(&consumer.shared().choice.share[at.place]);
            for (float& value : float4s[k].value) value = rounded_product(value, share);
            stage<M>(consumer, at.all, float4s[k]);
        }
    }
}

}  // namespace kccl::decode
