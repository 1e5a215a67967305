// Prefill runs a prompt in passes of up to kSquads chunks of kChunk positions. This file has the
// sizes of such a chunk, the slots of its vectors in the exchange buffer, and the steps that blocks
// announce to each other.
//
// A squad is the blocks of a lane group that run a chunk. With several squads, the lane group's
// blocks are cut into as many as a pass has chunks, and each squad has all rows of every product.
// So weights are read from memory once a pass, and a block multiplies each vector that it reads by
// many rows. Squads need nothing of each other but keys and values. Blocks that are left over when
// squads have equal shares announce the pass's end only.
//
// A chunk's vectors lie as products read them: [16 elements][position][float4]. So the elements
// that a tile of weights multiplies, those of all positions, lie in one contiguous piece of memory.
#pragma once

#include "exchange_buffer.cuh"
#include "kv_strand.cuh"

namespace kccl::decode {

// The steps of an op, in order. A block announces each step to the others when it has done it.
// Steps that a model does not need are left out.
enum class Step : uint32_t {
    kHalf,  // the block has written the op's scales, its messages, its keys and values, or its
            // parts of what experts give
    kSent,  // the block has sent to all ranks what experts give for its rows
    kDone,  // the block has written the op's output
    kNum,
};

template <class S>
constexpr bool kHasSquads = S::kSquads > 1;

// How the warps of a block multiply a chunk's vectors by a product's matrix M.
template <class S, class M>
struct ChunkPlan {
    // How many column tiles one lane of the matrix has, including tiles of zeros at the end.
    static constexpr uint32_t kTiles = M::kSteps * S::kWarps;
    // Returns how many column tiles of the vectors are copied to shared memory at a time (a run).
    // A run stays within the columns that one warp multiplies while the engine decodes
    // (product.cuh). In a format with strips (tiles that share scales: format.cuh), a run is one or
    // more whole strips, or a strip is one or more whole runs.
    KCCL_CONSTEXPR static uint32_t run() {
        constexpr uint32_t kStrip = M::Format::kStripTiles;
        uint32_t most = M::kSteps < S::kChunkSteps ? M::kSteps : S::kChunkSteps;
        while (M::kSteps % most != 0 || (most % kStrip != 0 && kStrip % most != 0)) --most;
        return most;
    }
    static constexpr uint32_t kRun = run();
    static constexpr uint32_t kRuns = kTiles / kRun;
    static constexpr uint32_t kVectors = Mma<typename M::Format::Operand>::kVectors;
    // Returns the number of parts into which a chunk's positions are cut. A warp multiplies a row
    // tile by one part at a time. There are enough parts to give all warps work, and none is so
    // long that a warp has too few registers for its sums. chunks.py has the same rule.
    // With squads a block has many row tiles, and a warp multiplies several of them.
    KCCL_CONSTEXPR static uint32_t parts() {
        constexpr uint32_t kMostEach = S::kChunkEach;
        constexpr uint32_t kLeast = kHasSquads<S> ? 0 : S::kChunkWarps;
        const uint32_t all = S::kChunk / kVectors;
        uint32_t parts = 1;
        while (parts < all &&
               (all % parts != 0 || all / parts > kMostEach || M::kMostTiles * parts < kLeast)) {
            ++parts;
        }
        return parts;
    }
    static constexpr uint32_t kParts = parts();
    // How many multiplications a warp makes with each tile: one for every kVectors positions of a
    // part.
    static constexpr uint32_t kEach = S::kChunk / kVectors / kParts;
    // How many row tiles a warp multiplies at a time, by the same loaded vectors.
    static constexpr uint32_t kRows = S::kChunkRows;
    // The row tiles of a round: a block multiplies so many of its row tiles, finishes their rows,
    // and goes on to the next ones. Without squads there is one round.
    static_assert(!kHasSquads<S> || kParts <= S::kChunkWarps, "a round has row tiles");
    static_assert(kHasSquads<S> || kRows == 1, "only squads have enough row tiles");
    static constexpr uint32_t kTilesOfRound =
        kHasSquads<S> ? S::kChunkWarps / kParts * kRows : M::kMostTiles;
};

// How four values of a message are stored: as FP32, or rounded to BF16 and packed into 64 bits.
template <bool IS_ROUNDED>
struct Message {
    using Type = Float4;
    KCCL_DECODE static Type pack(const Float4& four) { return four; }
    KCCL_DECODE static Float4 unpack(const Type& message) { return message; }
};
template <>
struct Message<true> {
    using Type = uint64_t;
    KCCL_DECODE static Type pack(const Float4& four) {
        Type message = 0;
        KCCL_UNROLL
        for (int i = 0; i < 4; ++i) {
            message |= Type{Element<bf16>::narrow(four.value[i]).bits} << 16 * i;
        }
        return message;
    }
    KCCL_DECODE static Float4 unpack(Type message) {
        Float4 four;
        KCCL_UNROLL
        for (int i = 0; i < 4; ++i) {
            four.value[i] = Element<bf16>::widen(bf16{static_cast<uint16_t>(message >> 16 * i)});
        }
        return four;
    }
};

// The slots of a chunk's MLP, in float4s behind those of attention, and the row tiles of its
// products whose sums a block holds (BesideVectors::totals).
template <class S, bool HAS_EXPERTS = S::kHasExperts>
struct ChunkMlp {
    using Dims = Shape<S>;
    static constexpr uint32_t kStripe = S::kChunk * kTileFloat4s;
    static constexpr uint32_t kMostTiles = Dims::GateUp::kMostTiles;
    static constexpr uint32_t kMostLaneTiles = Dims::Down::kMostTiles;
    static constexpr uint32_t kNumOutputs = 0;
    using DownPlan = ChunkPlan<S, typename Dims::Down>;
    // [lane][...], staged for the matrix unit: the MLP's hidden vectors.
    static constexpr uint32_t kActs = 0;
    static constexpr uint32_t kEnd = Dims::kLanesHere * DownPlan::kTiles * kStripe;
};
template <class S>
struct ChunkMlp<S, true> {
    using Dims = Shape<S>;
    using GateUp = typename Dims::ExpertGateUp;
    using Down = typename Dims::ExpertDown::One;
    static constexpr uint32_t kStripe = S::kChunk * kTileFloat4s;
    // Experts' products need no totals.
    static constexpr uint32_t kMostTiles = Dims::Router::kMostTiles, kMostLaneTiles = 0;
    // [lane of all ranks][...], as Message::pack() stores them: what the chosen experts give. One
    // rank sends nothing.
    static constexpr uint32_t kNumOutputs =
        S::kWorldSize > 1 ? S::kNumLanes * (S::kHidden / kTileRows) * kStripe : 0;
    // [...]: the router's logits.
    static constexpr uint32_t kRouted = 0;
    // [...]: the residual times the norm's weights, staged for the experts' products.
    static constexpr uint32_t kNormed = kRouted + kRouterRows<S> / kTileRows * kStripe;
    // [lane][place][...]: the experts' hidden vectors, times the experts' shares, staged.
    static constexpr uint32_t kTilesOfActs = Down::kSteps * S::kWarps;
    static constexpr uint32_t kActs = kNormed + GateUp::kSteps * S::kWarps * kStripe;
    // [lane][part of the columns][...]: what the chosen experts give.
    static constexpr uint32_t kParts =
        kActs + Dims::kLanesHere * S::kPlaces * kTilesOfActs * kStripe;
    static constexpr uint32_t kEnd =
        kParts + Dims::kLanesHere * S::kWarps * (S::kHidden / kTileRows) * kStripe;
};

template <class S>
struct ChunkLayout {
    using Dims = Shape<S>;
    using Mlp = ChunkMlp<S>;
    static constexpr uint32_t kNum = S::kChunk;
    static_assert(kNum % Mma<f16>::kVectors == 0, "whole multiplications");
    static_assert(S::kHidden % kTileRows == 0 && Dims::kQkvRows % kTileRows == 0, "whole tiles");
    // How many float4s 16 elements of a vector take for all positions of a chunk.
    static constexpr uint32_t kStripe = kNum * kTileFloat4s;

    // Returns the largest number of float4s of sums that a block has in one product, for all
    // positions.
    KCCL_CONSTEXPR static uint32_t most_totals() {
        if (kHasSquads<S>) return QkvPlan::kTilesOfRound * kStripe;
        const uint32_t rows = most_of(Dims::Qkv::kMostTiles, Mlp::kMostTiles);
        const uint32_t lanes = most_of(Dims::Out::kMostTiles, Mlp::kMostLaneTiles);
        return most_of(rows, lanes * Dims::kLanesPerGroup) * kStripe;
    }
    using QkvPlan = ChunkPlan<S, typename Dims::Qkv>;
    using OutPlan = ChunkPlan<S, typename Dims::Out>;
    static constexpr uint32_t kTotals = most_totals();
    // Returns where a float4 of four rows' sums lies among the totals. tile: the row tile and lane.
    // The halves of a tile change places for two of four positions, so that threads of a warp
    // (Mma::Lane::for_each_place) use different banks.
    KCCL_CONSTEXPR static uint32_t total_at(uint32_t tile, uint32_t number, uint32_t index4) {
        return (tile * kNum + number) * kTileFloat4s + (index4 ^ (number & 2u));
    }

    // Returns how many positions attention multiplies together, each with all query heads of a KV
    // head.
    KCCL_CONSTEXPR static uint32_t together() {
        const uint32_t most = most_of(Mma<f16>::kVectors / Dims::kHeadsPerKv, 1);
        return most < kNum ? most : kNum;
    }
    static constexpr uint32_t kTogether = together();
    static constexpr uint32_t kQueries = kTogether * Dims::kHeadsPerKv;
    // The partial results of the KV strands are merged in two turns: first kFold at a time into
    // kNodes partial results, then these into one.
    static constexpr uint32_t kFold = least_of(S::kKvStrands, kKcclDecodeFold);
    static constexpr uint32_t kNodes = S::kKvStrands / kFold;
    struct Partials {
        Float4 kv_strands[S::kKvStrands][kQueries][Dims::kPartialFloat4s];
        Float4 nodes[kNodes][kQueries][Dims::kPartialFloat4s];
    };

    // ---- Slots of the exchange buffer, behind those of decode, in float4s -----------------------

    static constexpr uint32_t kHiddenFloat4s = S::kHidden / kTileRows * kStripe;
    static constexpr uint32_t kHeadsFloat4s = S::kHeads * Dims::kHeadFloat4s;

    // [rank][block], a word each: the number of the last step that the block has done, or 0. The
    // block itself stores it, in its own rank's buffer or in those of all ranks. Producer warps
    // poll it.
    static constexpr uint32_t kDone = Slots<S>::kFloat4s;
    // [chunk % 2][rank], a word each. If that rank's host had cancelled the request by the end of
    // the chunk, block 0 of that rank stores Task.number here, in the buffers of all ranks. Words
    // are never cleared: any other number means 'not cancelled'. There are two rows because a rank
    // may write for one chunk while another still reads the row of the chunk before.
    static constexpr uint32_t kGivenUp = kDone + ceil_div(S::kWorldSize * S::kBlocks, 4);
    // [squad][module % kMessageModules][lane of all ranks][...], as Message::pack() stores them: a
    // module's output of a lane, which other lanes add. Other ranks write these messages, so
    // everything before them has the same size on all ranks. message_modules() in
    // monokernel/chunks.py says why a message is no longer read when another takes its place.
    using Sent = Message<S::kRoundsMessages>;
    static constexpr uint32_t kMessages = kGivenUp + ceil_div(2 * S::kWorldSize, 4);
    static constexpr uint32_t kNumMessages =
        S::kNumLanes > Dims::kLanesPerGroup ? S::kMessageModules * S::kNumLanes * kHiddenFloat4s
                                            : 0;
    // What experts give, in the same form. All layers use these slots. Before a rank sends there
    // again, each of its blocks has waited for the next layer's attention messages of the blocks
    // with its rows on all ranks. These send them after add_outputs().
    static constexpr uint32_t kOfFloat4 = sizeof(Float4) / sizeof(typename Sent::Type);
    // kMessageAreas modules have room, in the kernels with and without squads alike. So squad 0's
    // vectors lie where the kernel without squads has them, and no columns of zeros behind a
    // vector's end, which nothing writes, lie where the other kernel writes something else.
    static_assert(S::kSquads * S::kMessageModules <= S::kMessageAreas, "messages have room");
    static constexpr uint32_t kOutputs =
        kMessages + S::kMessageAreas * (kNumMessages / S::kMessageModules / kOfFloat4);
    // From here on each squad has slots of its own. These are squad 0's.
    // kResidual, [lane group][...]: the residual. kNormed, likewise: the residual times the next
    // norm's weights, staged for the matrix unit.
    static constexpr uint32_t kResidual = kOutputs + Mlp::kNumOutputs / kOfFloat4;
    static constexpr uint32_t kNormed = kResidual + Dims::kLaneGroups * kHiddenFloat4s;
    // [lane group][position], a float each: 1 / the root of the residual's mean square.
    static constexpr uint32_t kScales = kNormed + Dims::kLaneGroups * QkvPlan::kTiles * kStripe;
    // [lane][...]: queries, keys and values, before norm and RoPE.
    static constexpr uint32_t kQkv = kScales + Dims::kLaneGroups * ceil_div(kNum, 4);
    // kQueriesAt, [lane][KV head][position][query head][...]: queries after norm and RoPE, staged
    // for the matrix unit. kOwnPartials, likewise: the partial result of each position's attention
    // to itself.
    static constexpr uint32_t kQueriesAt =
        kQkv + Dims::kLanesHere * (Dims::kQkvRows / kTileRows) * kStripe;
    static constexpr uint32_t kOwnPartials = kQueriesAt + Dims::kLanesHere * kNum * kHeadsFloat4s;
    // [lane][...], staged for the matrix unit: the results of attention.
    static constexpr uint32_t kAttended =
        kOwnPartials + Dims::kLanesHere * kNum * S::kHeads * Dims::kPartialFloat4s;
    // The MLP's slots: ChunkMlp.
    static constexpr uint32_t kMlp = kAttended + Dims::kLanesHere * OutPlan::kTiles * kStripe;
    static constexpr uint32_t kActs = kMlp + Mlp::kActs;
    static constexpr uint32_t kOfSquad = kMlp + Mlp::kEnd - kResidual;
    static constexpr uint32_t kEnd = kResidual + S::kSquads * kOfSquad;
    static_assert(!kHasSquads<S> || !S::kHasExperts, "experts' products have no squads");
    static_assert(S::kSquads <= Dims::kBlocksPerGroup, "a squad has blocks");

    // Returns where float4 `index4` of a vector lies for position `number` of the chunk, in float4s
    // from the beginning of the vector's slots.
    KCCL_CONSTEXPR static uint32_t at(uint32_t index4, uint32_t number) {
        return (index4 / 4 * kNum + number) * 4 + index4 % 4;
    }
    // Returns where a float4 of a lane's message lies, counted in Message::Type from kMessages on.
    // `lane` counts the lanes of all ranks.
    KCCL_CONSTEXPR static uint32_t message_at(uint32_t module, uint32_t lane, uint32_t index4,
                                              uint32_t number) {
        return (module % S::kMessageModules * S::kNumLanes + lane) * kHiddenFloat4s +
               at(index4, number);
    }
    // Returns where a float4 of what a lane's experts give lies, counted from kOutputs on.
    KCCL_CONSTEXPR static uint32_t output_at(uint32_t lane, uint32_t index4, uint32_t number) {
        return lane * kHiddenFloat4s + at(index4, number);
    }
    // Returns where a float4 of a part of what a lane's experts give lies.
    KCCL_CONSTEXPR static uint32_t part_of_output(uint32_t lane, uint32_t part, uint32_t index4,
                                                  uint32_t number) {
        return kMlp + Mlp::kParts + (lane * S::kWarps + part) * kHiddenFloat4s + at(index4, number);
    }
    // Returns where a KV head's first query head lies for position `number` of the chunk, counted
    // in heads from kQueriesAt on. `lane` counts this rank's lanes.
    KCCL_DECODE static uint32_t first_head(uint32_t lane, uint32_t kv_head, uint32_t number) {
        return ((lane * S::kKvHeads + kv_head) * kNum + number) * Dims::kHeadsPerKv;
    }

    // ---- Steps ----------------------------------------------------------------------------------

    // Steps are numbered from 1, through all passes of all requests: the chunks of all squads have
    // their pass's number. A layer has the steps of its ops. Before them comes one step for the
    // embedding, which only the first layer uses.
    static constexpr uint32_t kEach = static_cast<uint32_t>(Step::kNum);
    static constexpr uint32_t kOfLayer = S::kNumOps * kEach + 1;
    // How many steps a chunk has. The last one is its end.
    static constexpr uint32_t kSteps = S::kNumLayers * kOfLayer + 1;
    // Returns the number of a step of op `op` of a layer. Numbers grow from chunk to chunk. `op`
    // counts the ops of the layer.
    KCCL_DECODE static uint32_t number_of(uint32_t chunk, uint32_t layer, uint32_t op, Step step) {
        return chunk * kSteps + layer * kOfLayer + op * kEach + static_cast<uint32_t>(step) + 2;
    }
    KCCL_DECODE static uint32_t embedded_in(uint32_t chunk) { return chunk * kSteps + 1; }
    // Returns the number of the step that gives an op its input: the last step of the op before it.
    template <uint32_t OP>
    KCCL_DECODE static uint32_t number_before(uint32_t chunk, uint32_t layer) {
        if constexpr (OP != 0) return number_of(chunk, layer, OP - 1, Step::kDone);
        return layer == 0 ? embedded_in(chunk)
                          : number_of(chunk, layer - 1, S::kNumOps - 1, Step::kDone);
    }
    // Returns the number of the step that ends a module. `module` counts the modules of all layers.
    KCCL_DECODE static uint32_t number_of_module(uint32_t chunk, uint32_t module) {
        const uint32_t op = op_of_module<S>(module % S::kNumModules);
        return number_of(chunk, module / S::kNumModules, op, Step::kDone);
    }
    KCCL_DECODE static uint32_t end_of(uint32_t chunk) { return (chunk + 1) * kSteps; }
};

// Why a block stops: a wait has failed, or the request was cancelled. kNoStop: it goes on.
enum Stop : uint32_t { kNoStop, kWaitFailed, kRequestOver };

// The shared memory of a block in prefill, besides the ring of vectors.
template <class S>
struct BesideVectors {
    KvStrandArea<ChunkLayout<S>::kQueries> kv_strands[S::kChunkWarps];
    // [position][part]: the sum of squares of a part of the residual. Parts are those of decode's
    // warps.
    float squares[S::kChunk][S::kWarps];
    MeetingPlace met;
    mem::CopyBarrier ready;  // ends a phase when the producer warp lets the consumer warps go on
    uint32_t stops[2];       // a Stop for each parity of the phase of `ready`
    // The sums of a round of a product, [row tile][lane][position][row] (ChunkLayout::total_at).
    // They come last, so that the ring's stages lie right behind them: see
    // PrefillShared::partials().
    alignas(kKcclLineBytes) Float4 totals[ChunkLayout<S>::kTotals];
};

// Returns the number of stages of the ring of vectors: S::kChunkStages, or as many as fit.
template <class S>
KCCL_CONSTEXPR uint32_t num_vector_stages() {
    constexpr uint32_t kStage = S::kChunkSteps * ChunkLayout<S>::kStripe * sizeof(StagedFloat4);
    constexpr uint32_t kEach = kStage + 2 * sizeof(mem::CopyBarrier);
    // The second term: bytes that the alignment of the struct's end may take.
    constexpr uint32_t kRest = sizeof(BesideVectors<S>) + kKcclLineBytes;
    static_assert(kRest + 2 * kEach <= S::kSharedBytes, "a block has enough memory");
    constexpr uint32_t kFit = (S::kSharedBytes - kRest) / kEach;
    return kFit < S::kChunkStages ? kFit : S::kChunkStages;
}

template <class S>
using VectorRing =
    Ring<num_vector_stages<S>(), S::kChunkSteps * ChunkLayout<S>::kStripe * sizeof(StagedFloat4)>;

template <class S>
struct PrefillShared : BesideVectors<S> {
    using Partials = typename ChunkLayout<S>::Partials;

    // Holds the vectors that products multiply.
    VectorRing<S> ring;

    // Returns where attention's partial results lie. The producer warp copies the next vectors only
    // when attention is done.
    KCCL_DECODE Partials& partials() { return in_stages<Partials>(); }

    // Returns where something lies while no product uses the ring's stages or the totals: in the
    // stages and, where these are too few, in `totals` before them. All totals have been read.
    template <class T>
    KCCL_DECODE T& in_stages() {
        static_assert(
            sizeof(T) <= sizeof(Float4) * ChunkLayout<S>::kTotals + sizeof(VectorRing<S>::stage),
            "the totals and the stages have enough memory");
        constexpr uint64_t kLines = ceil_div(sizeof(T), kKcclLineBytes);
        constexpr uint64_t kOfStages = sizeof(VectorRing<S>::stage) / kKcclLineBytes;
        constexpr uint64_t kBefore = kLines > kOfStages ? kLines - kOfStages : 0;
        return *reinterpret_cast<T*>(ring.stage[0] - kBefore * kKcclLineBytes);
    }
};

}  // namespace kccl::decode
