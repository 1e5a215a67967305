// Computes, at compile time, what follows from the sizes of a model and of a machine: which rows a
// block has, where weights lie, how much memory is needed. Python writes these sizes as a struct, S
// (engine/monokernel/source.py).
//
// A *lane* is a share of a layer's heads and MLP columns. A *lane group* is the blocks of a rank
// that share a residual. A Laneformer has one lane group for each of the rank's lanes; an ordinary
// model has one lane group with all of the rank's lanes. The rows of a product (a matrix times a
// vector) are cut into tiles of 16, and the tiles into contiguous parts, one for each block of the
// lane group. The columns are cut over the warps of a block, in every block alike. So the order in
// which a row's sum is added up does not depend on the numbers of ranks and blocks.
#pragma once

#include "balance.cuh"
#include "expert_shape.cuh"
#include "format.cuh"
#include "sequence.cuh"

namespace kccl::decode {

KCCL_CONSTEXPR uint32_t ceil_div(uint32_t a, uint32_t b) { return (a + b - 1) / b; }
KCCL_CONSTEXPR uint32_t most_of(uint32_t a, uint32_t b) { return a < b ? b : a; }

// A contiguous part of some things: `num` of them, from number `first` on. cut() divides `total`
// things into n such parts, and returns part i.
struct Cut {
    uint32_t first;
    uint32_t num;
};
KCCL_CONSTEXPR Cut cut(uint32_t total, uint32_t i, uint32_t n) {
    const uint32_t first = static_cast<uint32_t>(uint64_t{total} * i / n);
    return {first, static_cast<uint32_t>(uint64_t{total} * (i + 1) / n) - first};
}

// Whether stages in format F are multiplied part by part (product_in_place.cuh): where it has
// minimums, or where it has scales and several positions of a request share the weights, because
// that code is shorter.
template <class S, class F>
constexpr bool kIsPartByPart =
    !S::kWeightsInRegisters &&
    (F::kHasMinimums || (F::kScaleBytes != 0 && S::kColumns > 1 && !S::kHasSeats));

// The packed matrix of a product, whose rows BLOCKS blocks share. F is the format of its weights.
// The product multiplies one vector of COLUMNS values for each of LANES lanes. The sums of
// different lanes are not added up. Tiles of 16 x 16 weights lie in memory as [row
// tile][lane][step][warp]: in each step every warp multiplies one tile. In a format with strips
// (tiles that share scales, see format.cuh) they lie as [row tile][lane][strip][warp][tile]. If the
// row tiles do not divide evenly, kTiles % BLOCKS consecutive blocks have one more. These begin
// with block LONGER, and behind the last block comes block 0.
template <class S, class F, uint32_t ROWS, uint32_t COLUMNS, uint32_t LANES, uint32_t BLOCKS,
          uint32_t LONGER>
struct Matrix {
    using Format = F;
    static_assert(ROWS % kTileRows == 0 && COLUMNS % kTileColumns == 0, "whole tiles");
    static constexpr uint32_t kTiles = ROWS / kTileRows;
    // The row tiles that have biases of their own (biases.cuh).
    static constexpr uint32_t kBiasTiles = kTiles;
    static constexpr uint32_t kColumns = COLUMNS;
    static constexpr uint32_t kLanes = LANES;
    static constexpr uint32_t kBlocks = BLOCKS;
    // The largest number of row tiles that a block has.
    static constexpr uint32_t kMostTiles = ceil_div(kTiles, BLOCKS);
    // How many steps a row tile takes for one lane: whole strips, and for the residual a multiple
    // of S::kStepUnit. Where the columns do not divide evenly, the last warps' parts are filled up
    // with tiles of zeros.
    static constexpr uint32_t kStepUnit = COLUMNS == S::kHidden ? S::kStepUnit : 1;
    static constexpr uint32_t kLeastSteps =
        ceil_div(COLUMNS / kTileColumns, S::kWarps* kStepUnit) * kStepUnit;
    static constexpr uint32_t kSteps = ceil_div(kLeastSteps, F::kStripTiles) * F::kStripTiles;
    static constexpr uint32_t kStepBytes = S::kWarps * kTileBytesOf<F>;
    // How many float4s (four FP32 numbers each) of one lane's vector a warp multiplies.
    static constexpr uint32_t kFloat4s = kSteps * kTileFloat4s;
    // A stage is the steps whose weights are loaded together. It reads its part of the vector from
    // one contiguous piece of the staged vector (in shared memory); behind the vector's end it
    // begins again. So a vector that is shorter than a stage is staged several times in a row. If
    // neither the steps of a stage nor those of the vector (kAllSteps) divide the other number, a
    // stage may cross the vector's end. So the vector's beginning is staged behind its end, too.
    // Once is enough where stages are multiplied part by part: no part crosses the vector's end.
    static constexpr uint32_t kAllSteps = LANES * kSteps;
    static constexpr uint32_t kStageSteps = kStageStepsOf<S, F>;
    static_assert(kStageSteps % F::kStripTiles == 0, "whole strips");
    static constexpr bool kIsEven = kAllSteps % kStageSteps == 0 || kStageSteps % kAllSteps == 0;
    static constexpr uint32_t kStagedSteps = kIsPartByPart<S, F> ? kAllSteps
                                             : kIsEven
                                                 ? most_of(kStageSteps / kAllSteps, 1) * kAllSteps
                                                 : kAllSteps + kStageSteps;
    static constexpr uint32_t kCopies = ceil_div(kStagedSteps, kAllSteps);
    static constexpr uint32_t kStaged = kStagedSteps * kTileFloat4s;

    static_assert(LONGER < BLOCKS, "one of the blocks");
    // Returns the number of a block's first row tile. first_of(BLOCKS) is kTiles.
    KCCL_CONSTEXPR static uint32_t first_of(uint32_t block) {
        constexpr uint32_t kNumLonger = kTiles % BLOCKS, kEnd = LONGER + kNumLonger;
        constexpr uint32_t kWrapped = kEnd > BLOCKS ? kEnd - BLOCKS : 0;
        const uint32_t behind = block > LONGER ? block - LONGER : 0;
        return kTiles / BLOCKS * block + least_of(block, kWrapped) + least_of(behind, kNumLonger);
    }
    KCCL_CONSTEXPR static Cut tiles_of(uint32_t block) {
        const uint32_t first = first_of(block);
        return {first, first_of(block + 1) - first};
    }
    // Returns the number of the block that has row tile `tile`.
    KCCL_CONSTEXPR static uint32_t owner_of(uint32_t tile) {
        uint32_t owner = 0, behind = BLOCKS;
        while (owner + 1 < behind) {
            const uint32_t middle = (owner + behind) / 2;
            (first_of(middle) <= tile ? owner : behind) = middle;
        }
        return owner;
    }
    // kPacked: how many packed tiles of 16 x 16 weights a row tile has, over all lanes. kTileUnits:
    // the size of one packed tile, in units of kUnitBytes (format.cuh). kPackedUnits: the size of
    // all packed tiles of a row tile, in these units.
    static constexpr uint32_t kPacked = LANES * kSteps * S::kWarps;
    static constexpr uint32_t kTileUnits = kTileBytesOf<F> / kUnitBytes<S>;
    static constexpr uint32_t kPackedUnits = kPacked * kTileUnits;
    // tile_at() returns where a warp's tile of a step begins, and strip_at() where the strip with
    // that tile begins. Both return bytes from the beginning of the row tile's part for one lane.
    KCCL_CONSTEXPR static uint32_t strip_at(uint32_t step, uint32_t warp) {
        return (step / F::kStripTiles * S::kWarps + warp) * kStripBytes<F>;
    }
    KCCL_CONSTEXPR static uint32_t tile_at(uint32_t step, uint32_t warp) {
        return strip_at(step, warp) + step % F::kStripTiles * F::kTileBytes;
    }
};

// The matrices M of a layer's products, in the order of the model's program (sequence.cuh).
template <class... M>
struct Matrices {
    KCCL_CONSTEXPR static uint32_t most_staged() {
        uint32_t most = 0;
        ((most = most_of(most, M::kStaged)), ...);
        return most;
    }
    // Returns the largest number of row tiles of sums that a block has in one product. A row tile
    // has sums of its own for each lane.
    KCCL_CONSTEXPR static uint32_t most_sums() {
        uint32_t most = 0;
        ((most = most_of(most, M::kMostTiles * M::kLanes)), ...);
        return most;
    }
    // Returns the size of a layer's packed tiles of all blocks before `block`, in units of
    // kUnitBytes.
    KCCL_CONSTEXPR static uint64_t packed_before(uint32_t block) {
        return (... + (uint64_t{M::tiles_of(block).first} * M::kPackedUnits));
    }
    // Returns the size of a block's packed tiles of a layer's first `num` products, in units of
    // kUnitBytes.
    KCCL_CONSTEXPR static uint64_t packed_of(uint32_t block, uint32_t num) {
        uint64_t packed = 0;
        uint32_t i = 0;
        ((packed += uint64_t{num > i++ ? M::tiles_of(block).num : 0} * M::kPackedUnits), ...);
        return packed;
    }
};

template <class S>
struct Shape : S {
    // The model's lanes are spread over the ranks. This rank has kLanesHere of them. Where that
    // number differs between ranks, their kernels differ, too.
    static constexpr uint32_t kLanesHere = S::kLanesHere;
    static constexpr bool kAreRanksEven = kLanesHere * S::kWorldSize == S::kNumLanes;
    KCCL_CONSTEXPR static uint32_t first_lane_of(uint32_t rank) {
        if (kAreRanksEven) return rank * kLanesHere;
        return cut(S::kNumLanes, rank, S::kWorldSize).first;
    }
    KCCL_CONSTEXPR static uint32_t rank_of(uint32_t lane) {
        if (kAreRanksEven) return lane / kLanesHere;
        return ((lane + 1) * S::kWorldSize - 1) / S::kNumLanes;
    }
    static constexpr uint32_t kLaneGroups = S::kNumResiduals == 1 ? 1 : kLanesHere;
    static constexpr uint32_t kLanesPerGroup = kLanesHere / kLaneGroups;
    static constexpr uint32_t kBlocksPerGroup = S::kBlocks / kLaneGroups;
    static constexpr uint32_t kModules = S::kNumModules * S::kNumLayers;
    static_assert(kAreRanksEven || kLaneGroups == 1, "ranks have equally many groups");
    static_assert(kBlocksPerGroup * kLaneGroups == S::kBlocks, "groups have equally many blocks");
    static_assert(S::kWorldSize * S::kBlocks <= kKcclDecodeMostBlocks,
                  "32 threads have 32 bits each to tell the blocks of all ranks apart");

    // lane_group_of() returns the lane group of a block, block_in_group_of() the block's number in
    // its lane group, block_of() the block with such a number. Neighbouring blocks share a part of
    // the path to memory. So they belong to different lane groups, and all lane groups get the same
    // bandwidth.
    KCCL_CONSTEXPR static uint32_t lane_group_of(uint32_t block) { return block % kLaneGroups; }
    KCCL_CONSTEXPR static uint32_t block_in_group_of(uint32_t block) { return block / kLaneGroups; }
    KCCL_CONSTEXPR static uint32_t block_of(uint32_t lane_group, uint32_t block_in_group) {
        return block_in_group * kLaneGroups + lane_group;
    }

    // For one lane: the rows of Qkv (queries, keys and values), and the elements of attention's
    // result.
    static constexpr uint32_t kQkvRows = (S::kHeads + 2 * S::kKvHeads) * S::kHeadDim;
    static constexpr uint32_t kAttendedRows = S::kHeads * S::kHeadDim;

    static constexpr uint32_t kGateUpRows = 2 * kLanesPerGroup * S::kPlaces * S::kFfn;
    using LongerFrom = Balance<kBlocksPerGroup, kLanesPerGroup * kQkvRows, kGateUpRows, S::kHidden,
                               S::kHasExperts>;
    static constexpr uint32_t kLongerGateUp = LongerFrom::kGateUp;
    static constexpr uint32_t kLongerRouter = LongerFrom::kRouter;
    // Block i of each lane group of all ranks must have the same rows of Out and Down: prefill
    // waits only for these blocks (PrefillProducer::await_row). The balance differs between ranks
    // that have different numbers of lanes. So kLongerOut follows from it only if kAreRanksEven.
    static constexpr uint32_t kLongerOut = kAreRanksEven ? LongerFrom::kOut : 0;
    using Qkv =
        Matrix<S, typename S::QkvFormat, kLanesPerGroup * kQkvRows, S::kHidden, 1, kBlocksPerGroup>;
    using Out = Matrix<S, typename S::OutFormat, S::kHidden, kAttendedRows, kLanesPerGroup,
                       kBlocksPerGroup, kLongerOut>;
    // A row tile has 8 rows of the MLP's gate matrix, followed by the same 8 rows of its "up"
    // matrix.
    using GateUp = Matrix<S, typename S::GateUpFormat, kGateUpRows, S::kHidden, 1, kBlocksPerGroup,
                          kLongerGateUp>;
    using Router = RouterMatrix<S>;
    using ExpertGateUp = ExpertGateUpMatrix<S>;
    using ExpertDown = ExpertDownMatrix<S>;
    // The first product of the MLP.
    using OfMlp = typename If<S::kHasExperts, Router, GateUp>::Type;
    // Qkv and OfMlp multiply the residual, and so does ExpertGateUp. It is staged in the same way
    // for both, whose stages may have different numbers of steps.
    static_assert(Qkv::kSteps == OfMlp::kSteps, "a warp has the same part of the residual");
    using OfResidual = typename MostStaged<S, Qkv, OfMlp>::Type;
    using Down = Matrix<S, typename S::DownFormat, S::kHidden, S::kFfn, kLanesPerGroup,
                        kBlocksPerGroup, kLongerOut>;
    // The head is the last product, which gives the logits. If it has parts, there is one for each
    // residual, and the blocks of a lane group share the rows of one part. Otherwise all blocks
    // share the rank's rows of the head.
    static constexpr bool kHasHeadParts = S::kNumHeadParts > 1;
    static_assert(S::kNumHeadParts == 1 || S::kNumHeadParts == S::kNumResiduals, "one for each");
    static constexpr uint32_t kHeadParts = kHasHeadParts ? S::kNumHeadParts : S::kWorldSize;
    using Head = Matrix<S, typename S::HeadFormat, S::kVocab / kHeadParts, S::kHidden, 1,
                        kHasHeadParts ? kBlocksPerGroup : S::kBlocks>;
    static_assert(S::kVocab % (kHeadParts * kTileRows) == 0, "parts have whole tiles");
    // Returns the number of the first row of the head that a rank has.
    KCCL_CONSTEXPR static uint32_t first_head_row_of(uint32_t rank) {
        return (kHasHeadParts ? first_lane_of(rank) : rank) * (S::kVocab / kHeadParts);
    }
    // Returns which row tiles of the head a block has. They are counted among the rank's row tiles.
    KCCL_CONSTEXPR static Cut head_tiles_of(uint32_t block) {
        if (!kHasHeadParts) return Head::tiles_of(block);
        const Cut of_group = Head::tiles_of(block_in_group_of(block));
        return {lane_group_of(block) * Head::kTiles + of_group.first, of_group.num};
    }

    // Attention. The positions in the cache of a KV head are cut into tiles of 16. Tile t belongs
    // to KV strand t % kKvStrands, which one warp goes through. KV strand s belongs to KV split s %
    // kKvSplits, which one block goes through. Each KV strand gives a partial result. These are
    // merged in a binary tree (merge_all), in which the KV strands of a KV split come together
    // first. So the result's bits do not depend on kKvSplits.
    static constexpr uint32_t kHeadsPerKv = S::kHeads / S::kKvHeads;
    static constexpr uint32_t kKvStrandsPerSplit = S::kKvStrands / S::kKvSplits;
    static constexpr uint32_t kWorkItems = kLanesPerGroup * S::kKvHeads * S::kKvSplits;
    static constexpr uint32_t kHeadTilesOfDim = S::kHeadDim / kTileColumns;
    static constexpr uint32_t kHeadFloat4s = S::kHeadDim / 4;
    // The float4s of a published partial result (Partial): those of a head with the weighted sums
    // of the values, then one float4 {maximum, weight, 0, 0}.
    static constexpr uint32_t kPartialFloat4s = kHeadFloat4s + kKcclDecodePartialFloat4s;
    static_assert((S::kKvStrands & (S::kKvStrands - 1)) == 0 && S::kKvStrands % S::kKvSplits == 0,
                  "a binary tree");
    static_assert(S::kHeadDim % kTileColumns == 0, "whole tiles");
    static_assert(kHeadFloat4s <= platform::kWarpSize, "a thread has one float4 of a head");
    static_assert(kHeadsPerKv * kTileFloat4s <= platform::kWarpSize,
                  "a thread for each float4 of scores");
    // The size of 16 positions of one KV head in the cache, in bytes: their keys, then their
    // values, transposed.
    static constexpr uint32_t kCacheTileBytes = 2 * kHeadTilesOfDim * kTileBytes;
    static constexpr uint32_t kCacheTiles = ceil_div(S::kContext, kTileRows);

    // Returns how many float4s of shared memory a warp needs for what it stages: its part of a
    // product's vector, or the queries of a KV head.
    KCCL_CONSTEXPR static uint32_t most_staged() {
        const uint32_t queries = kHeadsPerKv * kHeadFloat4s;
        return most_of(most_of(S::template Products<Shape>::most_staged(), Head::kStaged), queries);
    }
    // A column's part begins kMostStaged float4s behind that of the column before, in another half
    // of the banks of shared memory: threads read two columns at a time.
    static constexpr uint32_t kMostStaged =
        most_staged() + (S::kColumns > 1 && most_staged() % 8 == 0 ? 4 : 0);

    // kAttendFloat4s: how many float4s of shared memory a warp needs for attention (KvStrandArea).
    // most_sums() returns the most that it needs for this, or for its sums of a product.
    static constexpr uint32_t kAttendFloat4s =
        kHeadsPerKv * 2 * kTileFloat4s + ceil_div(kHeadsPerKv, 4);
    KCCL_CONSTEXPR static uint32_t most_sums() {
        const uint32_t head = least_of(Head::kMostTiles, S::kHeadTiles);
        const uint32_t tiles = most_of(S::template Products<Shape>::most_sums(), head);
        return most_of(kAttendFloat4s, tiles * kTileFloat4s);
    }
    // A column's sums begin kMostSums float4s behind those of the column before, which is eight
    // banks further: threads store eight rows of four columns at a time.
    static constexpr uint32_t kMostSums =
        most_sums() + (S::kColumns > 1 ? (10 - most_sums() % 8) % 8 : 0);

    // kConsumerThreads: the threads of a block's consumer warps, which multiply. kOwnFloat4s: how
    // many float4s of the columns' residuals each of them keeps in registers.
    static constexpr uint32_t kConsumerThreads = S::kWarps * platform::kWarpSize;
    static constexpr uint32_t kOwnFloat4s =
        ceil_div(S::kColumns * Out::kMostTiles * kTileFloat4s, kConsumerThreads);

    // packed_before() returns the size of a layer's packed tiles of the blocks of a lane group that
    // come before block_in_group. packed_by() returns the size of those of block_in_group itself.
    // Both count units of kUnitBytes.
    KCCL_CONSTEXPR static uint64_t packed_before(uint32_t block_in_group) {
        return S::template Products<Shape>::packed_before(block_in_group);
    }
    KCCL_CONSTEXPR static uint64_t packed_by(uint32_t block_in_group) {
        return packed_before(block_in_group + 1) - packed_before(block_in_group);
    }
    // Returns where a block's weight stream begins in the rank's packed weights, in units of
    // kUnitBytes. The weight stream is the block's packed tiles in the order in which it reads
    // them: those of all layers, then those of the head.
    KCCL_CONSTEXPR static uint64_t stream_of(uint32_t block) {
        const uint32_t lane_group = lane_group_of(block), block_in_group = block_in_group_of(block);
        return (lane_group * packed_before(block_in_group + 1) +
                (kLaneGroups - lane_group) * packed_before(block_in_group)) *
                   S::kNumLayers +
               uint64_t{head_tiles_before(block)} * Head::kPackedUnits;
    }
    KCCL_CONSTEXPR static uint32_t head_tiles_before(uint32_t block) {
        if (!kHasHeadParts) return Head::tiles_of(block).first;
        const uint32_t lane_group = lane_group_of(block), block_in_group = block_in_group_of(block);
        return lane_group * Head::tiles_of(block_in_group + 1).first +
               (kLaneGroups - lane_group) * Head::tiles_of(block_in_group).first;
    }

    static constexpr uint32_t kStageBytes = S::kWarps * most_stage_bytes<S>(typename S::Formats{});
};

template <class S>
using Products = typename S::template Products<Shape<S>>;

// MatrixAt<I, M...>::Type is the I-th of the types M. MatrixOf uses it to find the Matrix of a
// layer's product.
template <uint32_t I, class FIRST, class... M>
struct MatrixAt : MatrixAt<I - 1, M...> {};
template <class FIRST, class... M>
struct MatrixAt<0, FIRST, M...> {
    using Type = FIRST;
};
template <uint32_t I, class... M>
KCCL_CONSTEXPR typename MatrixAt<I, M...>::Type matrix_at(Matrices<M...>) {
    return {};
}
template <class S, Product<S> PRODUCT>
using MatrixOf = decltype(matrix_at<static_cast<uint32_t>(PRODUCT)>(Products<S>{}));

// Returns which products have format F. Bit i is set if product i of a layer has it. The bit behind
// those of a layer's products stands for the head.
template <class F, class HEAD, class... M>
KCCL_CONSTEXPR uint32_t that_have_format(Matrices<M...>) {
    uint32_t bits = 0, i = 0;
    ((bits |= (kIsSame<F, typename M::Format> ? 1u : 0u) << i++), ...);
    return bits | (kIsSame<F, typename HEAD::Format> ? 1u : 0u) << i;
}

// Calls role.run<F>(), where F is the format of `product`, and returns its result. If the model has
// only one format, this compiles to no branch.
template <class S, class Role, class FIRST, class... REST>
KCCL_DECODE auto with_one_of(FormatList<FIRST, REST...>, Product<S> product, const Role& role) {
    if constexpr (sizeof...(REST) != 0) {
        constexpr uint32_t kThese = that_have_format<FIRST, typename Shape<S>::Head>(Products<S>{});
        if (!is_one_of<kThese>(product)) {
            return with_one_of<S>(FormatList<REST...>{}, product, role);
        }
    }
    return role.template run<FIRST>();
}
template <class S, class Role>
KCCL_DECODE auto with_format(Product<S> product, const Role& role) {
    return with_one_of<S>(typename S::Formats{}, product, role);
}

// step_bytes() returns how many bytes of packed weights one step of a product has, over all warps
// of a block.
template <class S>
struct StepBytes {
    template <class F>
    KCCL_DECODE uint32_t run() const {
        return S::kWarps * kTileBytesOf<F>;
    }
};
template <class S>
KCCL_DECODE uint32_t step_bytes(Product<S> product) {
    return with_format<S>(product, StepBytes<S>{});
}

// stage_steps() returns how many steps a full stage of a product has. The product's last stage may
// have fewer.
template <class S>
struct StageSteps {
    template <class F>
    KCCL_DECODE uint32_t run() const {
        return kStageStepsOf<S, F>;
    }
};
template <class S>
KCCL_DECODE uint32_t stage_steps(Product<S> product) {
    return with_format<S>(product, StageSteps<S>{});
}

}  // namespace kccl::decode
