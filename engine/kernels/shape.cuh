// What of a model and a machine is known when the kernel is compiled: S, a struct that Python
// writes (engine/monokernel/source.py), and what follows from it.
//
// A *group* is the blocks that share a residual. A Laneformer has one group for each of the rank's
// lanes; an ordinary model has one group with all of the rank's lanes. The rows of a product are
// cut into tiles of 16, and the tiles into contiguous parts, one for each block of the group. A
// warp multiplies the same part of the columns for all rows of its block. So the order of a sum
// does not depend on the numbers of ranks and blocks.
#pragma once

#include "mma.cuh"
#include "sequence.cuh"

namespace kccl::decode {

KCCL_CONSTEXPR uint32_t ceil_div(uint32_t a, uint32_t b) { return (a + b - 1) / b; }
KCCL_CONSTEXPR uint32_t most_of(uint32_t a, uint32_t b) { return a < b ? b : a; }
KCCL_CONSTEXPR uint32_t least_of(uint32_t a, uint32_t b) { return a < b ? a : b; }

// Part i of n, of `total` things.
struct Cut {
    uint32_t first;
    uint32_t num;
};
KCCL_CONSTEXPR Cut cut(uint32_t total, uint32_t i, uint32_t n) {
    const uint32_t first = static_cast<uint32_t>(uint64_t{total} * i / n);
    return {first, static_cast<uint32_t>(uint64_t{total} * (i + 1) / n) - first};
}

// A product of `BLOCKS` blocks, with LANES inputs of COLUMNS values each, whose sums stay apart.
// Tiles lie in memory as [row tile][lane][step][warp]: each step is one tile for each warp. If the
// row tiles do not divide, kTiles % BLOCKS consecutive blocks have one more, beginning with block
// LONGER and wrapping to block 0.
template <class S, uint32_t ROWS, uint32_t COLUMNS, uint32_t LANES, uint32_t BLOCKS,
          uint32_t LONGER = 0>
struct Matrix {
    static_assert(ROWS % kTileRows == 0 && COLUMNS % kTileColumns == 0, "whole tiles");
    static constexpr uint32_t kTiles = ROWS / kTileRows;
    static constexpr uint32_t kColumns = COLUMNS;
    static constexpr uint32_t kLanes = LANES;
    static constexpr uint32_t kBlocks = BLOCKS;
    // Row tiles of one block.
    static constexpr uint32_t kMostTiles = ceil_div(kTiles, BLOCKS);
    // Steps of a row tile for one lane. Where they are not whole, zeros fill up.
    static constexpr uint32_t kSteps = ceil_div(COLUMNS / kTileColumns, S::kWarps);
    static constexpr uint32_t kStepBytes = S::kWarps * kTileBytes;
    // A warp's quads of one lane's vector.
    static constexpr uint32_t kQuads = kSteps * kTileQuads;
    // A stage takes its inputs from one stretch of what is staged. So a vector that is shorter than
    // a stage is staged several times.
    static constexpr uint32_t kAllSteps = LANES * kSteps;
    static constexpr uint32_t kCopies = most_of(S::kStageSteps / kAllSteps, 1);
    static_assert(kAllSteps % S::kStageSteps == 0 || S::kStageSteps % kAllSteps == 0,
                  "the steps of a stage, and those of a vector's lanes: one divides the other");
    static constexpr uint32_t kStaged = kCopies * kAllSteps * kTileQuads;

    static_assert(LONGER < BLOCKS, "one of the blocks");
    // A block's first row tile. first_of(BLOCKS) is kTiles.
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
    // The block that has a row tile.
    KCCL_CONSTEXPR static uint32_t owner_of(uint32_t tile) {
        uint32_t owner = 0, behind = BLOCKS;
        while (owner + 1 < behind) {
            const uint32_t middle = (owner + behind) / 2;
            (first_of(middle) <= tile ? owner : behind) = middle;
        }
        return owner;
    }
    // Packed tiles of a row tile.
    static constexpr uint32_t kPacked = LANES * kSteps * S::kWarps;
};

// The products of a layer, M, in the order of the program.
template <class... M>
struct Matrices {
    KCCL_CONSTEXPR static uint32_t most_staged() {
        uint32_t most = 0;
        ((most = most_of(most, M::kStaged)), ...);
        return most;
    }
    // Row tiles of all lanes, whose sums stay apart, of a block.
    KCCL_CONSTEXPR static uint32_t most_sums() {
        uint32_t most = 0;
        ((most = most_of(most, M::kMostTiles * M::kLanes)), ...);
        return most;
    }
    // Packed tiles of all blocks before one of them.
    KCCL_CONSTEXPR static uint64_t packed_before(uint32_t block) {
        return (... + (uint64_t{M::tiles_of(block).first} * M::kPacked));
    }
    // Packed tiles of a block, of the first `num` products.
    KCCL_CONSTEXPR static uint64_t packed_of(uint32_t block, uint32_t num) {
        uint64_t packed = 0;
        uint32_t i = 0;
        ((packed += uint64_t{num > i++ ? M::tiles_of(block).num : 0} * M::kPacked), ...);
        return packed;
    }
};

template <class S>
struct Shape : S {
    // Lanes are cut over the ranks. A rank has kLanesHere; where that differs from rank to rank, so
    // do their kernels.
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
    static constexpr uint32_t kGroups = S::kNumResiduals == 1 ? 1 : kLanesHere;
    static constexpr uint32_t kGroupLanes = kLanesHere / kGroups;
    static constexpr uint32_t kGroupBlocks = S::kBlocks / kGroups;
    static constexpr uint32_t kModules = 2 * S::kNumLayers;
    static_assert(kAreRanksEven || kGroups == 1, "ranks have equally many groups");
    static_assert(kGroupBlocks * kGroups == S::kBlocks, "groups have equally many blocks");

    // A block's group, and its number there. Neighbours are of different groups: they share a part
    // of the way to the memory, and groups are to go at the same speed.
    KCCL_CONSTEXPR static uint32_t group_of(uint32_t block) { return block % kGroups; }
    KCCL_CONSTEXPR static uint32_t member_of(uint32_t block) { return block / kGroups; }
    KCCL_CONSTEXPR static uint32_t block_of(uint32_t group, uint32_t member) {
        return member * kGroups + group;
    }

    // Rows of a lane.
    static constexpr uint32_t kQkvRows = (S::kHeads + 2 * S::kKvHeads) * S::kHeadDim;
    static constexpr uint32_t kAttendedRows = S::kHeads * S::kHeadDim;

    // Balances the blocks' bytes of a layer. The first blocks have the extra row tiles of Qkv. So
    // the first of them have one fewer of GateUp, and the next ones of Out and Down, which are cut
    // in the same way.
    KCCL_CONSTEXPR static uint32_t num_shorter(uint32_t rows) {
        return (kGroupBlocks - rows / kTileRows % kGroupBlocks) % kGroupBlocks;
    }
    static constexpr uint32_t kGateUpRows = 2 * kGroupLanes * S::kFfn;
    static constexpr uint32_t kLongerGateUp = num_shorter(kGateUpRows);
    // Block i of every rank has the same rows of the residual: prefill relies on it
    // (Lookout::await_row). Where ranks have different numbers of lanes, kLongerGateUp differs.
    static constexpr uint32_t kLongerOut =
        kAreRanksEven ? (kLongerGateUp + num_shorter(S::kHidden)) % kGroupBlocks : 0;
    using Qkv = Matrix<S, kGroupLanes * kQkvRows, S::kHidden, 1, kGroupBlocks>;
    using Out = Matrix<S, S::kHidden, kAttendedRows, kGroupLanes, kGroupBlocks, kLongerOut>;
    // A tile has 8 rows of the gate, and behind them the same rows of "up".
    using GateUp = Matrix<S, kGateUpRows, S::kHidden, 1, kGroupBlocks, kLongerGateUp>;
    using Down = Matrix<S, S::kHidden, S::kFfn, kGroupLanes, kGroupBlocks, kLongerOut>;
    // A head with parts has one for each residual. Otherwise all blocks share the rank's rows.
    static constexpr bool kHasHeadParts = S::kNumHeadParts > 1;
    static_assert(S::kNumHeadParts == 1 || S::kNumHeadParts == S::kNumResiduals, "one for each");
    static constexpr uint32_t kHeadParts = kHasHeadParts ? S::kNumHeadParts : S::kWorldSize;
    using Head =
        Matrix<S, S::kVocab / kHeadParts, S::kHidden, 1, kHasHeadParts ? kGroupBlocks : S::kBlocks>;
    static_assert(S::kVocab % (kHeadParts * kTileRows) == 0, "parts have whole tiles");
    // The first row of a rank.
    KCCL_CONSTEXPR static uint32_t first_head_row_of(uint32_t rank) {
        return (kHasHeadParts ? first_lane_of(rank) : rank) * (S::kVocab / kHeadParts);
    }
    // The row tiles of a block, among the rank's.
    KCCL_CONSTEXPR static Cut head_tiles_of(uint32_t block) {
        if (!kHasHeadParts) return Head::tiles_of(block);
        const Cut of_group = Head::tiles_of(member_of(block));
        return {group_of(block) * Head::kTiles + of_group.first, of_group.num};
    }

    // Attention. Positions are cut into tiles of 16. Tile t belongs to strand t % kStrands, which
    // one warp goes through. Of the strands of a KV head, strand s belongs to split s % kSplits,
    // and each split to one block. Results are merged in a binary tree over the strands
    // (merge_all), in which the strands of a split come together first. So their bits do not depend
    // on kSplits.
    static constexpr uint32_t kHeadsPerKv = S::kHeads / S::kKvHeads;
    static constexpr uint32_t kSplitStrands = S::kStrands / S::kSplits;
    static constexpr uint32_t kUnits = kGroupLanes * S::kKvHeads * S::kSplits;
    static constexpr uint32_t kHeadTilesOfDim = S::kHeadDim / kTileColumns;
    static constexpr uint32_t kHeadQuads = S::kHeadDim / 4;
    // A split's published part: the quads of a head, and one of {maximum, sum, 0, 0}.
    static constexpr uint32_t kPartQuads = kHeadQuads + 1;
    static_assert((S::kStrands & (S::kStrands - 1)) == 0 && S::kStrands % S::kSplits == 0,
                  "a binary tree");
    static_assert(S::kHeadDim % kTileColumns == 0, "whole tiles");
    static_assert(kHeadQuads <= platform::kWarpSize, "a thread has one quad of a head");
    static_assert(kHeadsPerKv * kTileQuads <= platform::kWarpSize,
                  "a thread for each quad of scores");
    // Bytes of the cache of one KV head for 16 positions: keys, then values turned.
    static constexpr uint32_t kCacheTileBytes = 2 * kHeadTilesOfDim * kTileBytes;
    static constexpr uint32_t kCacheTiles = ceil_div(S::kContext, kTileRows);

    // A warp's staged vector, or the queries of a KV head, in quads.
    KCCL_CONSTEXPR static uint32_t most_staged() {
        const uint32_t queries = kHeadsPerKv * kHeadQuads;
        return most_of(most_of(S::template Products<Shape>::most_staged(), Head::kStaged), queries);
    }
    static constexpr uint32_t kMostStaged = most_staged();

    // A warp's sums of one op, or what attention needs, in quads.
    static constexpr uint32_t kAttendQuads =
        kHeadsPerKv * 2 * kTileQuads + ceil_div(kHeadsPerKv, 4);
    KCCL_CONSTEXPR static uint32_t most_sums() {
        const uint32_t head = least_of(Head::kMostTiles, S::kHeadTiles);
        const uint32_t tiles = most_of(S::template Products<Shape>::most_sums(), head);
        return most_of(kAttendQuads, tiles * kTileQuads);
    }
    static constexpr uint32_t kMostSums = most_sums();

    // The residual's quads that a thread keeps.
    static constexpr uint32_t kConsumers = S::kWarps * platform::kWarpSize;
    static constexpr uint32_t kOwnQuads = ceil_div(Out::kMostTiles * kTileQuads, kConsumers);

    // Packed tiles of a layer of the group's blocks before one of them.
    KCCL_CONSTEXPR static uint64_t packed_before(uint32_t member) {
        return S::template Products<Shape>::packed_before(member);
    }
    KCCL_CONSTEXPR static uint64_t packed_by(uint32_t member) {
        return packed_before(member + 1) - packed_before(member);
    }
    // Where a block's packed tiles begin: those of its layers, and then those of the head.
    KCCL_CONSTEXPR static uint64_t stream_of(uint32_t block) {
        const uint32_t group = group_of(block), member = member_of(block);
        return (group * packed_before(member + 1) + (kGroups - group) * packed_before(member)) *
                   S::kNumLayers +
               uint64_t{head_tiles_before(block)} * Head::kPacked;
    }
    KCCL_CONSTEXPR static uint32_t head_tiles_before(uint32_t block) {
        if (!kHasHeadParts) return Head::tiles_of(block).first;
        const uint32_t group = group_of(block), member = member_of(block);
        return group * Head::tiles_of(member + 1).first +
               (kGroups - group) * Head::tiles_of(member).first;
    }

    static constexpr uint32_t kStageBytes = S::kStageSteps * S::kWarps * kTileBytes;
};

template <class S>
using Products = typename S::template Products<Shape<S>>;

// The matrix of product number I.
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

}  // namespace kccl::decode
