// The layout of a block's shared memory.
#pragma once

#include "trace.cuh"
#include "watch.cuh"

namespace kccl::decode {

// kMaskBits: the ids that share a word of the mask (mask.cuh). kMaskWords: the words that a block
// needs for its rows of the head.
constexpr uint32_t kMaskBits = 32;
template <class S>
constexpr uint32_t kMaskWords =
    S::kSamples ? ceil_div(Shape<S>::Head::kMostTiles * kTileRows, kMaskBits) + 1 : 1;

// The block's shared memory except the ring buffer of weights. Shared adds the ring behind it. With
// S::kWeightsInRegisters there is no ring, and this is all.
template <class S>
struct Beside {
    StagedFloat4 staged[S::kWarps][Shape<S>::kMostStaged];
    // Each warp's sums of an op, or its memory for attention: [op % 2][warp].
    Float4 area[2][S::kWarps][Shape<S>::kMostSums];
    // Partial results of attention, [KV strand][query head]: float4s of a head, then
    // {maximum, sum, -, -}.
    Float4 partials[Shape<S>::kKvStrandsPerSplit][Shape<S>::kHeadsPerKv][Shape<S>::kPartialFloat4s];
    // The partial results of the position itself, [query head].
    Float4 own[Shape<S>::kHeadsPerKv][Shape<S>::kPartialFloat4s];
    // Sums of squares of each warp's part of a vector: [op % 2][warp][residual].
    float squares[2][S::kWarps][S::kNumResiduals];
    // Used at the end of a token step: each warp's most likely token, and the combination of all
    // blocks' control words.
    ControlWord best[S::kWarps];
    ControlWord ending;
    // Each warp's result, and the combined result of all blocks: sample.cuh.
    ControlWord control_words[S::kWarps][kNumControlWords];
    ControlWord found[kNumControlWords];
    uint32_t mask[kMaskWords<S>];  // which of the block's ids may be chosen, if not all
    // A copy of the task's layers. In global memory they would cost each op a load that nothing
    // hides.
    Layer layers[S::kNumLayers];
    uint32_t exchanges;  // the next exchange's number
    // The turns of RoPE at the token step's position.
    float cosines[S::kHeadDim / 2];
    float sines[S::kHeadDim / 2];
    // The sums of other lanes' messages for the block's rows of the residual: collect.cuh.
    Float4 landed[Shape<S>::Out::kMostTiles * kTileFloat4s];
    mem::CopyBarrier has_landed;
    mem::CopyBarrier was_read;  // consumer warps have read `landed`; without overlap: want it
    mem::CopyBarrier asked;     // where nothing overlaps: all warps ask for the next stage
    MeetingPlace met;
    mem::CopyBarrier ended;    // its first phase ends when the consumer warps have ended
    mem::CopyBarrier gave_up;  // its first phase ends when their waits are to fail
    int32_t token;
    uint32_t end;            // KcclEngineEnd
    uint32_t landed_failed;  // not 0: the wait for messages has failed
};

// Returns the number of stages of the ring of weights: as many as fit, and at most S::kMostStages.
template <class S>
KCCL_CONSTEXPR uint32_t num_stages() {
    constexpr uint32_t kEach = Shape<S>::kStageBytes + 2 * sizeof(mem::CopyBarrier);
    // bytes for the alignment of the ring
    constexpr uint32_t kRest = sizeof(Beside<S>) + 2 * kKcclLineBytes;
    static_assert(kRest + kEach <= S::kSharedBytes, "a block has enough memory");
    constexpr uint32_t kFit = (S::kSharedBytes - kRest) / kEach;
    return kFit < S::kMostStages ? kFit : S::kMostStages;
}

template <class S>
using WeightRing = Ring<num_stages<S>(), Shape<S>::kStageBytes>;

template <class S, bool HAS_RING = !S::kWeightsInRegisters>
struct Shared : Beside<S> {
    WeightRing<S> ring;
};
template <class S>
struct Shared<S, false> : Beside<S> {
    static_assert(sizeof(Beside<S>) <= S::kSharedBytes, "a block has enough memory");
};

// Makes the warp arrive once at a barrier. Called by all threads of the warp.
KCCL_DECODE void arrive_together(mem::CopyBarrier* barrier) {
    warp().sync();
    if (leads(warp())) mem::arrive(barrier);
}

}  // namespace kccl::decode
