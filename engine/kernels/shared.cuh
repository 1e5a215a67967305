// The layout of a block's shared memory.
#pragma once

#include "draft_pace.cuh"
#include "expert_choice.cuh"
#include "known_sums.cuh"
#include "trace.cuh"
#include "watch.cuh"

namespace kccl::decode {

// kMaskBits: how many ids share a word of the mask of allowed ids (mask.cuh). kMaskWords: how many
// words of the mask a block needs for its rows of the head.
constexpr uint32_t kMaskBits = 32;
template <class S>
constexpr uint32_t kMaskWords =
    S::kSamples ? ceil_div(Shape<S>::Head::kMostTiles * kTileRows, kMaskBits) + 1 : 1;

// Whether the partial results of attention lie where warps stage vectors, behind their queries,
// because that saves memory: those of KV strand i where warp i % S::kWarps does, and behind them
// those of positions to themselves, of column i.
template <class S>
struct StagedPartials {
    static constexpr uint32_t kQueries =
        Columns<S>::kTogether * Shape<S>::kHeadsPerKv * Shape<S>::kHeadFloat4s;
    static constexpr uint32_t kOfStrand = Columns<S>::kQueries * Shape<S>::kPartialFloat4s;
    static constexpr uint32_t kOwn =
        kQueries + ceil_div(Shape<S>::kKvStrandsPerSplit, S::kWarps) * kOfStrand;
    static constexpr uint32_t kEnd =
        kOwn + ceil_div(S::kColumns, S::kWarps) * Shape<S>::kHeadsPerKv * Shape<S>::kPartialFloat4s;
};
template <class S>
constexpr bool kStagesPartials =
    S::kColumns > 1 && StagedPartials<S>::kEnd <= S::kColumns* Shape<S>::kMostStaged;
static_assert(sizeof(StagedFloat4) == sizeof(Float4), "partial results fit into staged vectors");

// Only kernels with seats have this.
template <class S, bool HAS_SEATS = S::kHasSeats>
struct SharedSeats {};
template <class S>
struct SharedSeats<S, true> {
    // [column]: the number of its next exchange of sampling, modulo 4 (choosers.cuh).
    uint32_t exchanges_of[S::kColumns];
};

// How many areas a warp has for its sums. One leaves more memory for the ring of weights. Then the
// warps meet at the beginning of each op, which partial results in staged vectors need anyway.
template <class S>
constexpr uint32_t kAreas = S::kHasSeats || kStagesPartials<S> ? 1 : 2;

// The block's shared memory except the ring of weights. Shared adds the ring behind it. With
// S::kWeightsInRegisters there is no ring, and this is all.
template <class S>
struct Beside : SharedChoice<S>,
                SharedExpertBiases<S>,
                SharedDrafts<S>,
                SharedSums<S>,
                SharedSeats<S> {
    // Each warp's part of the vectors that it multiplies, column by column, split for the matrix
    // unit.
    StagedFloat4 staged[S::kWarps][S::kColumns * Shape<S>::kMostStaged];
    // [op % 2][warp]: the warp's sums of an op, column by column, or its memory for attention
    // (KvStrandArea). There may be one area for all ops (kAreas).
    Float4 area[kAreas<S>][S::kWarps][S::kColumns * Shape<S>::kMostSums];
    // [KV strand][query]: partial results of attention, each the float4s of a head, then
    // {maximum, weight, -, -}. The queries are the query heads of each column.
    Float4 partials[kStagesPartials<S> ? 1 : Shape<S>::kKvStrandsPerSplit]
                   [kStagesPartials<S> ? 1 : Columns<S>::kQueries][Shape<S>::kPartialFloat4s];
    // [query]: the partial results of each position's attention to itself.
    Float4 own[kStagesPartials<S> ? 1 : S::kColumns * Shape<S>::kHeadsPerKv]
              [Shape<S>::kPartialFloat4s];
    // [op % 2][warp][column][residual]: the sum of squares of the warp's part of a residual.
    float squares[kAreas<S>][S::kWarps][S::kColumns * S::kNumResiduals];
    // Used at the end of a token step (endings.cuh), for each column: each warp's most likely
    // token, and the combination of its share of all blocks' control words.
    ControlWord best[S::kWarps][S::kColumns];
    ControlWord endings[S::kWarps][S::kColumns];
    // Used by an exchange of sampling (sample.cuh), for each kind of control word: each warp's
    // result, and the combined result of all blocks. With seats, a warp's row has both in turn.
    ControlWord control_words[S::kWarps][kNumControlWords];
    ControlWord found[kNumControlWords];
    // Which of the block's ids may be chosen, if not all. With seats, each warp has such a mask.
    uint32_t masks[S::kHasSeats ? S::kWarps : 1][kMaskWords<S>];
    // A copy of the task's layers. In global memory they would cost each op a load that nothing
    // hides.
    Layer layers[S::kNumLayers];
    uint32_t exchanges;  // the number of the next exchange of sampling
    // [column]: the rows of RoPE's tables for the token step's positions.
    float cosines[S::kColumns * S::kHeadDim / 2];
    float sines[S::kColumns * S::kHeadDim / 2];
    // [column]: the sums of other lanes' messages for the block's rows of the residual:
    // collect.cuh.
    Float4 landed[S::kColumns * Shape<S>::Out::kMostTiles * kTileFloat4s];
    // Ends a phase when the collecting warp has written `landed`.
    mem::CopyBarrier has_landed;
    // Ends a phase when the consumer warps have read `landed`; where nothing overlaps, when they
    // want to read it.
    mem::CopyBarrier was_read;
    // Used where nothing overlaps: ends a phase when all consumer warps want the next stage of
    // weights.
    mem::CopyBarrier asked;
    MeetingPlace met;
    mem::CopyBarrier ended;    // its first phase ends when the consumer warps have ended
    mem::CopyBarrier gave_up;  // its first phase ends when the block's waits must fail
    int32_t token;             // the next position's id (Verdict)
    uint32_t end;              // KcclEngineEnd (Verdict)
    uint32_t landed_failed;    // not 0: the wait for messages has failed
};

// Returns the number of stages of the ring of weights: as many as fit, and at most S::kMostStages.
template <class S>
KCCL_CONSTEXPR uint32_t num_stages() {
    constexpr uint32_t kEach = Shape<S>::kStageBytes + 2 * sizeof(mem::CopyBarrier);
    // The second term: bytes that the alignment of the ring may take.
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

// Makes the warp arrive once at a barrier, when all of its threads have called this.
KCCL_DECODE void arrive_together(mem::CopyBarrier* barrier) {
    warp().sync();
    if (leads(warp())) mem::arrive(barrier);
}

}  // namespace kccl::decode
