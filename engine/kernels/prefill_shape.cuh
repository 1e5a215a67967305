// Prefill reads a prompt kChunk positions at a time: how much that is, where vectors lie, and the
// steps that blocks wait for.
//
// A chunk's vectors lie as products read them: [16 elements][position][quad]. So a tile of weights
// meets all positions in one stretch of memory.
#pragma once

#include "board.cuh"
#include "strand.cuh"

namespace kccl::decode {

// The steps of an op, in their order. When a block has done one, it says so to the others. Steps
// that a model does not need are left out.
enum class Step : uint32_t {
    kHalf,  // the scales of what it multiplies, its messages, or its keys and values are there
    kDone,  // what it gives is there
    kNum,
};

// How a product multiplies a chunk.
template <class S, class M>
struct ChunkPlan {
    // Column tiles of a lane, with the zeros that fill up.
    static constexpr uint32_t kTiles = M::kSteps * S::kWarps;
    // So many are copied at a time; they are all of one warp's part of the columns in decode.
    KCCL_CONSTEXPR static uint32_t run() {
        uint32_t most = M::kSteps < S::kChunkSteps ? M::kSteps : S::kChunkSteps;
        while (M::kSteps % most != 0) --most;
        return most;
    }
    static constexpr uint32_t kRun = run();
    static constexpr uint32_t kRuns = kTiles / kRun;
    // A warp multiplies a row tile with one of so many parts of the positions. There are as many as
    // all warps need. tuning.py has the same rule.
    KCCL_CONSTEXPR static uint32_t parts() {
        const uint32_t all = S::kChunk / Mma<typename S::Weight>::kVectors;
        uint32_t parts = 1;
        while (parts < all && (all % parts != 0 || M::kMostTiles * parts < S::kChunkWarps)) ++parts;
        return parts;
    }
    static constexpr uint32_t kParts = parts();
    // Multiplications of each tile.
    static constexpr uint32_t kEach = S::kChunk / Mma<typename S::Weight>::kVectors / kParts;
};

// What lanes send each other for a quad of the residual: FP32 words, or rounded ones.
template <bool IS_ROUNDED>
struct Message {
    using Type = Quad;
    KCCL_DEVICE static Type pack(const Quad& quad) { return quad; }
    KCCL_DEVICE static Quad unpack(const Type& message) { return message; }
};
template <>
struct Message<true> {
    using Type = uint64_t;
    KCCL_DEVICE static Type pack(const Quad& quad) {
        Type message = 0;
        KCCL_UNROLL
        for (int i = 0; i < 4; ++i) {
            message |= Type{Element<bf16>::narrow(quad.value[i]).bits} << 16 * i;
        }
        return message;
    }
    KCCL_DEVICE static Quad unpack(Type message) {
        Quad quad;
        KCCL_UNROLL
        for (int i = 0; i < 4; ++i) {
            quad.value[i] = Element<bf16>::widen(bf16{static_cast<uint16_t>(message >> 16 * i)});
        }
        return quad;
    }
};

template <class S>
struct Chunk {
    using Dims = Shape<S>;
    static constexpr uint32_t kNum = S::kChunk;
    static_assert(kNum % Mma<typename S::Weight>::kVectors == 0, "whole multiplications");
    static_assert(S::kHidden % kTileRows == 0 && Dims::kQkvRows % kTileRows == 0, "whole tiles");
    // Quads of 16 elements of all positions.
    static constexpr uint32_t kStripe = kNum * kTileQuads;

    // A block's products: the sums of its rows.
    KCCL_CONSTEXPR static uint32_t most_totals() {
        const uint32_t rows = most_of(Dims::Qkv::kMostTiles, Dims::GateUp::kMostTiles);
        const uint32_t lanes = most_of(Dims::Out::kMostTiles, Dims::Down::kMostTiles);
        return most_of(rows, lanes * Dims::kGroupLanes) * kStripe;
    }
    static constexpr uint32_t kTotals = most_totals();

    // Attention: so many positions share a multiplication, with all query heads of a KV head each.
    KCCL_CONSTEXPR static uint32_t together() {
        const uint32_t most = most_of(Mma<f16>::kVectors / Dims::kHeadsPerKv, 1);
        return most < kNum ? most : kNum;
    }
    static constexpr uint32_t kTogether = together();
    static constexpr uint32_t kQueries = kTogether * Dims::kHeadsPerKv;
    // Strands are merged in two turns, of at most kFold parts each.
    static constexpr uint32_t kFold = S::kStrands < 8 ? S::kStrands : 8;
    static constexpr uint32_t kNodes = S::kStrands / kFold;
    struct Parts {
        Quad strands[S::kStrands][kQueries][Dims::kPartQuads];
        Quad nodes[kNodes][kQueries][Dims::kPartQuads];
    };

    // ---- Places on the board, behind those of decode, in quads ----------------------------------

    using QkvPlan = ChunkPlan<S, typename Dims::Qkv>;
    using OutPlan = ChunkPlan<S, typename Dims::Out>;
    using DownPlan = ChunkPlan<S, typename Dims::Down>;
    static constexpr uint32_t kHiddenQuads = S::kHidden / kTileRows * kStripe;
    static constexpr uint32_t kHeadsQuads = S::kHeads * Dims::kHeadQuads;

    // [rank][block], a word each: the last step that the block has done.
    static constexpr uint32_t kDone = Places<S>::kQuads;
    // [pass % 2][rank], a word each: the request that the rank's host gave up in the pass.
    static constexpr uint32_t kGivenUp = kDone + ceil_div(S::kWorldSize * S::kBlocks, 4);
    // [module][lane of all ranks][...], packed. Other ranks write these, so what lies before them
    // has the same size on all ranks.
    using Sent = Message<S::kRoundsMessages>;
    static constexpr uint32_t kMessages = kGivenUp + ceil_div(2 * S::kWorldSize, 4);
    static constexpr uint32_t kNumMessages =
        S::kNumLanes > Dims::kGroupLanes ? Dims::kModules * S::kNumLanes * kHiddenQuads : 0;
    // [group][...]: the residual; and, staged, times the next norm's weights.
    static constexpr uint32_t kResidual =
        kMessages + kNumMessages / (sizeof(Quad) / sizeof(typename Sent::Type));
    static constexpr uint32_t kNormed = kResidual + Dims::kGroups * kHiddenQuads;
    // [group][position], a float each: 1 / the root of the residual's mean square.
    static constexpr uint32_t kScales = kNormed + Dims::kGroups * QkvPlan::kTiles * kStripe;
    // [lane][...]: queries, keys and values, before norm and RoPE.
    static constexpr uint32_t kQkv = kScales + Dims::kGroups * ceil_div(kNum, 4);
    // [lane][KV head][position][query head][...]: staged queries; and each position's part of its
    // own attention.
    static constexpr uint32_t kQueriesAt =
        kQkv + Dims::kLanesHere * (Dims::kQkvRows / kTileRows) * kStripe;
    static constexpr uint32_t kOwnParts = kQueriesAt + Dims::kLanesHere * kNum * kHeadsQuads;
    // [lane][...], staged.
    static constexpr uint32_t kAttended =
        kOwnParts + Dims::kLanesHere * kNum * S::kHeads * Dims::kPartQuads;
    static constexpr uint32_t kActs = kAttended + Dims::kLanesHere * OutPlan::kTiles * kStripe;
    static constexpr uint32_t kEnd = kActs + Dims::kLanesHere * DownPlan::kTiles * kStripe;

    // Quad `quad` of a vector, of the position with this number in the chunk.
    KCCL_CONSTEXPR static uint32_t at(uint32_t quad, uint32_t number) {
        return (quad / 4 * kNum + number) * 4 + quad % 4;
    }
    // Where a quad of a lane's message lies; `lane` counts those of all ranks.
    KCCL_CONSTEXPR static uint32_t message_at(uint32_t module, uint32_t lane, uint32_t quad,
                                              uint32_t number) {
        return (module * S::kNumLanes + lane) * kHiddenQuads + at(quad, number);
    }
    // The first of the query heads of a KV head; lane: of this rank's.
    KCCL_DEVICE static uint32_t first_head(uint32_t lane, uint32_t kv_head, uint32_t number) {
        return ((lane * S::kKvHeads + kv_head) * kNum + number) * Dims::kHeadsPerKv;
    }

    // ---- Steps ----------------------------------------------------------------------------------

    // A layer has those of its ops, and one before them, which the first layer uses alone: the
    // embedding is there.
    static constexpr uint32_t kEach = static_cast<uint32_t>(Step::kNum);
    static constexpr uint32_t kOfLayer = S::kNumOps * kEach + 1;
    // Steps of a pass; the last one is its end.
    static constexpr uint32_t kSteps = S::kNumLayers * kOfLayer + 1;
    // A step's number, which grows from pass to pass. op: of the layer.
    KCCL_DEVICE static uint32_t number_of(uint32_t pass, uint32_t layer, uint32_t op, Step step) {
        return pass * kSteps + layer * kOfLayer + op * kEach + static_cast<uint32_t>(step) + 2;
    }
    KCCL_DEVICE static uint32_t embedded_in(uint32_t pass) { return pass * kSteps + 1; }
    // The step that gives an op what it reads: the op before it has done its last one.
    template <uint32_t OP>
    KCCL_DEVICE static uint32_t number_before(uint32_t pass, uint32_t layer) {
        if constexpr (OP != 0) return number_of(pass, layer, OP - 1, Step::kDone);
        return layer == 0 ? embedded_in(pass)
                          : number_of(pass, layer - 1, S::kNumOps - 1, Step::kDone);
    }
    // The step that ends a module.
    KCCL_DEVICE static uint32_t number_of_module(uint32_t pass, uint32_t module) {
        const uint32_t op = op_of_module<S>(module % S::kNumModules);
        return number_of(pass, module / S::kNumModules, op, Step::kDone);
    }
    KCCL_DEVICE static uint32_t end_of(uint32_t pass) { return (pass + 1) * kSteps; }
};

// Why a block goes no further.
enum Stop : uint32_t { kNoStop, kWaitFailed, kRequestOver };

// Block-shared memory of prefill, besides the ring of vectors.
template <class S>
struct BesideVectors {
    StrandArea<Chunk<S>::kQueries> strands[S::kChunkWarps];
    // Sums of squares of each warp's part, as decode cuts it.
    float squares[S::kChunk][S::kWarps];
    MeetingPlace met;
    mem::CopyBarrier ready;  // a phase for each thing that the block waits for
    uint32_t stops[2];       // by the parity of the phase of `ready`: Stop
    // [row tile][lane][position][row]. At the end, so that the ring's stages lie behind it.
    alignas(kKcclLineBytes) Quad totals[Chunk<S>::kTotals];
};

// Stages of the ring of vectors: as many as were asked for, or as fit.
template <class S>
KCCL_CONSTEXPR uint32_t num_vector_stages() {
    constexpr uint32_t kStage = S::kChunkSteps * Chunk<S>::kStripe * sizeof(StagedQuad);
    constexpr uint32_t kEach = kStage + 2 * sizeof(mem::CopyBarrier);
    constexpr uint32_t kRest = sizeof(BesideVectors<S>) + kKcclLineBytes;  // what aligns the end
    static_assert(kRest + 2 * kEach <= S::kSharedBytes, "a block has enough memory");
    constexpr uint32_t kFit = (S::kSharedBytes - kRest) / kEach;
    return kFit < S::kChunkStages ? kFit : S::kChunkStages;
}

template <class S>
using VectorRing =
    Ring<num_vector_stages<S>(), S::kChunkSteps * Chunk<S>::kStripe * sizeof(StagedQuad)>;

template <class S>
struct PrefillShared : BesideVectors<S> {
    using Parts = typename Chunk<S>::Parts;

    // Has the vectors that products multiply.
    VectorRing<S> ring;

    // Attention has its parts in the stages and, where these are too few, in the totals before
    // them. No product uses either meanwhile: all totals have been read, and the lookout copies the
    // next vectors when attention is done.
    KCCL_DEVICE Parts& parts() {
        constexpr uint64_t kLines = ceil_div(sizeof(Parts), kKcclLineBytes);
        constexpr uint64_t kOfStages = sizeof(VectorRing<S>::stage) / kKcclLineBytes;
        constexpr uint64_t kBefore = kLines > kOfStages ? kLines - kOfStages : 0;
        return *reinterpret_cast<Parts*>(ring.stage[0] - kBefore * kKcclLineBytes);
    }

    static_assert(sizeof(Parts) <= sizeof(Quad) * Chunk<S>::kTotals + sizeof(VectorRing<S>::stage),
                  "attention's parts fit");
};

}  // namespace kccl::decode
