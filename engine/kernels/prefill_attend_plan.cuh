// How the warps of a block share attention of a chunk, and how much shared memory it takes
// (prefill_attend_warp.cuh).
#pragma once

#include "prefill_shape.cuh"
#include "query_mma.cuh"

namespace kccl::decode {

// Whether a chunk's queries are rows of the matrix unit. With more warps, or longer chunks, threads
// have too few registers for that, and attention was slower (bench/LOG.md).
template <class S>
constexpr bool kAttendsByQueries = QueryMma::kIsThere && S::kChunkWarps <= 8 && S::kChunk <= 64;

// Names the unit by a template, so that its members are looked up only where the target has them.
template <class S>
struct QueryUnit {
    using Type = QueryMma;
};

// How a block's warps share a work item: some query groups of 16 queries of a KV head, the splits,
// and parts of wide heads. A warp adds up the values of one part of the head.
template <class S>
struct TilePlan {
    using Dims = Shape<S>;
    using C = ChunkLayout<S>;
    using Unit = typename QueryUnit<S>::Type;
    static constexpr uint32_t kQueries = Unit::kQueries, kEach = Unit::kEach;
    // A warp has registers for the sums of so many tiles of values.
    static constexpr uint32_t kMostTiles = 4;
    KCCL_CONSTEXPR static uint32_t parts() {
        uint32_t parts = ceil_div(Dims::kHeadTilesOfDim, kMostTiles);
        while (Dims::kHeadTilesOfDim % parts != 0) ++parts;
        return parts;
    }
    static constexpr uint32_t kParts = parts();
    static constexpr uint32_t kTiles = Dims::kHeadTilesOfDim / kParts;
    static constexpr uint32_t kFloat4s = kTiles * kTileFloat4s;
    // The float4s of a thread's part of a partial result, and of a split's result for one query.
    static constexpr uint32_t kOfThread = kTiles * kEach + 1, kOfQuery = kFloat4s + 1;

    struct Sharing {
        uint32_t splits, groups;
    };
    // Returns the float4s of shared memory that a warp needs.
    KCCL_CONSTEXPR static uint32_t area(uint32_t splits) {
        uint32_t levels = 0;
        while (splits << levels < S::kKvStrands) ++levels;
        return most_of(levels * kOfThread * platform::kWarpSize, kQueries * kOfQuery);
    }
    // Returns the sharing that is estimated to take the least time, of those that fit. Of equal
    // ones it returns the one with the most groups, because groups read tiles together.
    KCCL_CONSTEXPR static Sharing sharing() {
        constexpr uint32_t kAll = ceil_div(C::kNum * Dims::kHeadsPerKv, kQueries);
        constexpr uint32_t kHeads = Dims::kLanesPerGroup * S::kKvHeads;
        constexpr uint32_t kBlocks = Dims::kBlocksPerGroup / S::kSquads;
        constexpr uint64_t kRoom =
            sizeof(Float4) * C::kTotals + sizeof(VectorRing<S>::stage) - kKcclLineBytes;
        Sharing best = {0, 0};
        uint32_t least = 0;
        for (uint32_t splits = 1; splits <= S::kKvStrands; splits *= 2) {
            uint32_t groups = least_of(S::kChunkWarps / (kParts * splits), kAll);
            const uint64_t each = uint64_t{kParts} * splits * area(splits) * sizeof(Float4);
            while (groups * each > kRoom) --groups;
            if (groups == 0) continue;
            const uint32_t items = kHeads * ceil_div(kAll, groups);
            const uint32_t time = ceil_div(items, kBlocks) * (S::kKvStrands / splits);
            if (best.groups != 0 && time >= least) continue;
            best = {splits, groups};
            least = time;
        }
        return best;
    }
    static constexpr uint32_t kSplits = sharing().splits, kGroups = sharing().groups;
    static_assert(kGroups > 0, "a block has enough warps and memory for 16 queries");
    static constexpr uint32_t kWarps = kGroups * kSplits * kParts;
    static constexpr uint32_t kLeaves = S::kKvStrands / kSplits;  // KV strands of a split
    struct Area {
        Float4 of_warp[kWarps][area(kSplits)];
    };
    KCCL_CONSTEXPR static uint32_t warp_of(uint32_t group, uint32_t split, uint32_t part) {
        return (group * kSplits + split) * kParts + part;
    }
};

}  // namespace kccl::decode
