// The experts that a position passes in a layer, as a block keeps them in shared memory.
#pragma once

#include "expert_shape.cuh"

namespace kccl::decode {

template <class S>
struct ExpertChoice {
    uint32_t expert[S::kPlaces];  // numbers of experts, in ascending order
    float share[S::kPlaces];      // by which each one's output is multiplied
};

// What a block's shared memory has for a mixture of experts. In other models it is empty.
template <class S, bool HAS_EXPERTS = S::kHasExperts>
struct SharedChoice {};
template <class S>
struct SharedChoice<S, true> {
    // Written by warp 0. All warps have met between the last use of a layer's choice and the next
    // layer's.
    ExpertChoice<S> choice;
    // Ends a phase when a layer's choice is written.
    alignas(16) mem::CopyBarrier has_chosen;
};

// The biases of a layer's chosen experts for the block's rows: expert_biases.cuh. Empty in models
// whose experts have none.
template <class S>
constexpr bool kHasExpertBiases =
    (that_have_experts<S>() & that_have_biases<S>()) == that_have_experts<S>() && S::kHasExperts;
template <class S, bool HAS_BIASES = kHasExpertBiases<S>>
struct SharedExpertBiases {
    static_assert((that_have_experts<S>() & that_have_biases<S>()) == 0,
                  "both products of experts have biases, or neither");
};
template <class S>
struct SharedExpertBiases<S, true> {
    static constexpr uint32_t kOfGateUp = Shape<S>::ExpertGateUp::kMostTiles * kTileFloat4s;
    static constexpr uint32_t kOfDown = Shape<S>::ExpertDown::kMostTiles * kTileFloat4s;
    Float4 of_gate_up[kOfGateUp];
    Float4 of_down[S::kPlaces][kOfDown];
    // Ends a phase when all of them have come.
    alignas(16) mem::CopyBarrier have_biases;
};

}  // namespace kccl::decode
