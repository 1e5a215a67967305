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

}  // namespace kccl::decode
