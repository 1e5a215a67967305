// The source of a multiplying warp's weights, which it hands out stage by stage. It is
// RegisterWeights if S::kWeightsInRegisters, else RingWeights. Each thread of the warp makes one
// object. All threads of the warp call each function together.
//
//   begin_token_step(has_head)
//                           a token step begins, whose last weights are those of the head, or not
//   await<F>(warp_index)    waits for the next stage, whose product has format F
//   try_await<F>(warp_index)
//                           the same without waiting. False: it is not there yet. Always false
//                           where nothing overlaps, and always false from RegisterWeights
//   strip<F>(lane, i)       this thread's part of the warp's i-th strip in it
//   has_copied()            the caller has copied the strips
//   has_multiplied(num)     of RegisterWeights alone: the caller has multiplied them, and needs
//                           them no more. `num`: steps that were left of the product, or of its
//                           part; the stage had at most so many
//   skip(num)               takes the next stage, which has so many steps, and does nothing with
//                           it. What is left in the warp's area means nothing
#pragma once

#include "weights_registers.cuh"
#include "weights_ring.cuh"

namespace kccl::decode {

template <class S, bool IN_REGISTERS = S::kWeightsInRegisters>
struct WeightsOf {
    using Type = RingWeights<S>;
};
template <class S>
struct WeightsOf<S, true> {
    using Type = RegisterWeights<S>;
};
template <class S>
using Weights = typename WeightsOf<S>::Type;

}  // namespace kccl::decode
