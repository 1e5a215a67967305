// What lies in a block's shared memory.
#pragma once

#include "trace.cuh"
#include "watch.cuh"

namespace kccl::decode {

// All but the ring of weights.
template <class S>
struct Beside {
    StagedQuad staged[S::kWarps][Shape<S>::kMostStaged];
    // [op % 2][warp]
    Quad area[2][S::kWarps][Shape<S>::kMostSums];
    // Strands of attention: [strand][query head]: quads of a head, then {maximum, sum, -, -}.
    Quad parts[Shape<S>::kSplitStrands][Shape<S>::kHeadsPerKv][Shape<S>::kPartQuads];
    // Likewise, of the position itself.
    Quad own[Shape<S>::kHeadsPerKv][Shape<S>::kPartQuads];
    // Sums of squares of each warp's part of a vector: [op % 2][warp][residual].
    float squares[2][S::kWarps][S::kNumResiduals];
    // At the end of a round: each warp's most likely token, and what all blocks say.
    Note best[S::kWarps];
    Note ending;
    // What each warp, and then all blocks, have found: sample.cuh.
    Note notes[S::kWarps][kNumNotes];
    Note found[kNumNotes];
    // Copied from the task's: in memory they would cost each op a load that nothing hides.
    Layer layers[S::kNumLayers];
    uint32_t exchanges;  // the next exchange's number
    // The turns of RoPE at the round's position.
    float cosines[S::kHeadDim / 2];
    float sines[S::kHeadDim / 2];
    // What other lanes' messages add to the block's rows of the residual: collect.cuh.
    Quad landed[Shape<S>::Out::kMostTiles * kTileQuads];
    mem::CopyBarrier has_landed;
    mem::CopyBarrier was_read;  // by the warps that multiply; or, where nothing overlaps, asked for
    mem::CopyBarrier asked;     // where nothing overlaps: all warps ask for the next stage
    MeetingPlace met;
    mem::CopyBarrier ended;    // its first phase ends when the warps that multiply have ended
    mem::CopyBarrier gave_up;  // likewise, when their waits are to fail
    int32_t token;
    uint32_t end;            // End
    uint32_t landed_failed;  // not 0: the wait for messages has failed
};

// Stages of the ring of weights: as many as fit.
template <class S>
KCCL_CONSTEXPR uint32_t num_stages() {
    constexpr uint32_t kEach = Shape<S>::kStageBytes + 2 * sizeof(mem::CopyBarrier);
    constexpr uint32_t kRest = sizeof(Beside<S>) + 2 * kKcclLineBytes;  // and what aligns the ring
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

// One arrival of a warp. Called by all its threads.
KCCL_DEVICE void arrive_together(mem::CopyBarrier* barrier) {
    warp().sync();
    if (leads(warp())) mem::arrive(barrier);
}

}  // namespace kccl::decode
