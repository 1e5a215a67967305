// The source of a consumer warp's weights, which it hands out stage by stage: a stage is the steps
// whose weights are loaded together. It is RegisterWeights if S::kWeightsInRegisters, else
// RingWeights. In a mixture of experts it is ExpertRegisterWeights or PoolWeights. Each thread of
// the warp makes one object. All threads of the warp call each function together.
//
//   begin_token_step(has_head)
//                           begins a token step. has_head: whether it reads the head's weights
//   await<F>(warp_index)    waits for the next stage, whose product has format F
//   try_await<F>(warp_index)
//                           returns false if the next stage is not there yet; otherwise does what
//                           await() does, and returns true. Where weights are in registers, always
//                           returns false, and so does RingWeights where nothing overlaps
//   strip<F>(lane, i)       returns this thread's part of the warp's i-th strip in the stage
//   has_copied()            tells that the caller has copied the stage's strips
//   has_multiplied(num)     in registers only: tells that the caller has multiplied the strips
//                           and needs them no more. num: the steps that were left of the product,
//                           or of its part, at the stage's beginning
//   begin_product(block, layer, product), end_product(product)
//                           with experts only: tell where a product of a layer begins and ends
//   skip(num)               takes the next stage, which has `num` steps, without using it. May
//                           leave meaningless numbers in the warp's area
#pragma once

#include "weights_pool.cuh"
#include "weights_registers_experts.cuh"
#include "weights_ring.cuh"

namespace kccl::decode {

template <class S, bool IN_REGISTERS = S::kWeightsInRegisters, bool HAS_EXPERTS = S::kHasExperts>
struct WeightsOf {
    using Type = RingWeights<S>;
};
template <class S>
struct WeightsOf<S, true, false> {
    using Type = RegisterWeights<S>;
};
template <class S>
struct WeightsOf<S, false, true> {
    using Type = PoolWeights<S>;
};
template <class S>
struct WeightsOf<S, true, true> {
    using Type = ExpertRegisterWeights<S>;
};
template <class S>
using Weights = typename WeightsOf<S>::Type;

}  // namespace kccl::decode
