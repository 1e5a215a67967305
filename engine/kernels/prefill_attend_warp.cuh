// What a warp does in attention of a chunk: 16 queries of a KV head over some of the tiles of the
// cache (query_mma.cuh). It reads each tile once for all of its queries.
//
// A query's result has the bits of decode's. There each KV strand gives a partial result, and a
// binary tree merges them (shape.cuh, merge_all). A warp has a subtree of it, a split: every n-th
// KV strand. It goes through these in the order of the tree, so few partial results wait to be
// merged. They wait in shared memory, each thread's part in a place of its own.
#pragma once

#include "attend.cuh"
#include "prefill_attend_plan.cuh"
#include "prefill_product.cuh"

namespace kccl::decode {

// What a warp does: attention of up to 16 queries over a split. A query is a query head of a
// position; those of a KV head are counted position by position.
template <class S>
class WarpOfQueries {
  public:
    using Dims = Shape<S>;
    using C = ChunkLayout<S>;
    using Plan = TilePlan<S>;
    using Unit = typename Plan::Unit;
    static constexpr uint32_t kEach = Plan::kEach, kTiles = Plan::kTiles;

    // area: the warp's shared memory. cache: of the KV head. part: of the head's elements.
    // first_head: the KV head's first query, counted in heads from ChunkLayout::kQueriesAt on.
    // first, end: the warp's queries. position: that of the chunk's first query.
    KCCL_DECODE WarpOfQueries(PrefillConsumer<S>& consumer, Float4* area, const uint8_t* cache,
                              uint32_t part, uint32_t first_head, uint32_t first, uint32_t end,
                              uint32_t position, uint32_t window)
        : area_(area),
          cache_(cache),
          part_(part),
          window_(window),
          earliest_(position + first / Dims::kHeadsPerKv),
          latest_(position + (end - 1) / Dims::kHeadsPerKv) {
        KCCL_UNROLL
        for (uint32_t i = 0; i < kEach; ++i) {
            // A query behind the last one is computed as the last one, and not stored.
            const uint32_t query = least_of(first + unit_.query(i), end - 1);
            mine_[i] = position + query / Dims::kHeadsPerKv;
            staged_[i] = reinterpret_cast<const StagedFloat4*>(
                consumer.here(C::kQueriesAt + (first_head + query) * Dims::kHeadFloat4s));
            own_[i] = consumer.here(C::kOwnPartials + (first_head + query) * Dims::kPartialFloat4s);
        }
    }

    // Goes through the split's KV strands, and stores its result for each query in the area.
    KCCL_DECODE void run(uint32_t split) {
        Result result;
        uint32_t waiting = 0;  // bit i: a partial result waits at level i
        bool is_there = false;
        ask_for_keys(first_tile_behind(split, ~0u));
#pragma unroll 1
        for (uint32_t leaf = 0; leaf < Plan::kLeaves; ++leaf) {
            const uint32_t kv_strand = kv_strand_of(split, leaf);
            is_there = first_tile(kv_strand) < end_of_tiles() || has_own(kv_strand);
            if (is_there) {
                run_kv_strand(result, first_tile(kv_strand), first_tile_behind(split, leaf));
                add_itself(result, kv_strand);
            }
            // A merge with a KV strand without positions would only make -0 of the sums 0, which no
            // product shows.
            uint32_t level = 0;
#pragma unroll 1
            for (; (leaf >> level & 1u) != 0; ++level) {
                if ((waiting >> level & 1u) == 0) continue;
                merge_waiting(result, level, is_there);
                waiting ^= 1u << level;
                is_there = true;
            }
            if (!is_there || leaf + 1 == Plan::kLeaves) continue;
            keep_waiting(result, level);
            waiting |= 1u << level;
        }
        if (!is_there) clear(result);
        // The result takes the place of partial results of other threads.
        warp().sync();
        store(result);
    }

  private:
    static constexpr uint32_t kNoTile = ~0u;
    // This thread's part of a partial result.
    struct Result {
        Float4 sums[kTiles][kEach];
        float maximums[kEach];
        float weights[kEach];
    };

    // Returns which of the split's KV strands is leaf number `leaf` of the tree: the bits of `leaf`
    // in the opposite order choose among every kSplits-th strand. So the strands whose numbers
    // differ most are neighbours, as in merge_all().
    KCCL_DECODE static uint32_t kv_strand_of(uint32_t split, uint32_t leaf) {
        uint32_t reversed = 0;
        KCCL_UNROLL
        for (uint32_t bit = 1; bit < Plan::kLeaves; bit *= 2) {
            reversed = reversed * 2 + (leaf / bit & 1u);
        }
        return reversed * Plan::kSplits + split;
    }

    // Tells whether one of the positions belongs to a KV strand.
    KCCL_DECODE bool has_own(uint32_t kv_strand) const {
        const uint32_t first = earliest_ / kTileRows;
        return (kv_strand - first) % S::kKvStrands <= latest_ / kTileRows - first;
    }

    // Returns the first position that `position` sees, which depends on the window.
    KCCL_DECODE uint32_t first_seen(uint32_t position) const {
        return window_ != 0 && position >= window_ ? position - window_ + 1 : 0;
    }
    // first_tile() returns the number of the first tile of a KV strand that one of the queries
    // sees. end_of_tiles() returns the number behind the last tile that they see.
    KCCL_DECODE uint32_t first_tile(uint32_t kv_strand) const {
        const uint32_t first = first_seen(earliest_) / kTileRows;
        return first + (kv_strand + S::kKvStrands - first % S::kKvStrands) % S::kKvStrands;
    }
    // Returns the first tile of the KV strands whose turn comes after `leaf`, or kNoTile.
    KCCL_DECODE uint32_t first_tile_behind(uint32_t split, uint32_t leaf) const {
#pragma unroll 1
        while (++leaf < Plan::kLeaves) {
            const uint32_t first = first_tile(kv_strand_of(split, leaf));
            if (first < end_of_tiles()) return first;
        }
        return kNoTile;
    }
    KCCL_DECODE uint32_t end_of_tiles() const { return ceil_div(latest_, kTileRows); }
    KCCL_DECODE const uint8_t* tile_at(uint32_t at) const {
        return cache_ + uint64_t{at} * Dims::kCacheTileBytes;
    }

    // Begins to load the keys of tile number `at` of the cache, if one of the warp's queries sees a
    // position in it.
    KCCL_DECODE void ask_for_keys(uint32_t at) {
        if (at >= end_of_tiles()) return;
        asked_ = at;
        KCCL_UNROLL
        for (uint32_t i = 0; i < Dims::kHeadTilesOfDim; ++i) {
            keys_[i] = unit_.tile(tile_at(at) + i * kTileBytes);
        }
    }

    // Computes the partial result of a KV strand. behind: the first tile of the next one.
    KCCL_DECODE void run_kv_strand(Result& result, uint32_t first, uint32_t behind) {
        ScoresSoFar so_far[kEach];
        typename Unit::Sums sums[kTiles] = {};
#pragma unroll 1
        for (uint32_t at = first; at < end_of_tiles(); at += S::kKvStrands) {
            if (asked_ != at) ask_for_keys(at);
            typename Unit::Tile values[kTiles];
            KCCL_UNROLL
            for (uint32_t i = 0; i < kTiles; ++i) {
                const uint32_t number = Dims::kHeadTilesOfDim + part_ * kTiles + i;
                values[i] = unit_.tile(tile_at(at) + number * kTileBytes);
            }
            typename Unit::Sums products = {};
            KCCL_UNROLL
            for (uint32_t i = 0; i < Dims::kHeadTilesOfDim; ++i) {
                Unit::multiply(products, unit_.load(staged_, i), keys_[i]);
            }
            const uint32_t next = at + S::kKvStrands;
            ask_for_keys(next < end_of_tiles() ? next : behind);
            Float4 scores[kEach];
            Unit::totals(products, scores);
            hide_unseen(scores, at);
            StagedFloat4 staged[kEach];
            float scales[kEach];
            bool is_scaled = false;
            KCCL_UNROLL
            for (uint32_t i = 0; i < kEach; ++i) {
                scales[i] = so_far[i].add(scores[i]);
                staged[i] = split<f16>(scores[i]);
                is_scaled |= scales[i] != 1.0f;
            }
            // The maximum is an integer, so it seldom grows. Before the first tile sums are zero.
            if (at != first && platform::warp_any(is_scaled)) {
                KCCL_UNROLL
                for (uint32_t i = 0; i < kTiles; ++i) Unit::scale(sums[i], scales);
            }
            const typename Unit::Rows weights = unit_.rows(staged);
            KCCL_UNROLL
            for (uint32_t i = 0; i < kTiles; ++i) Unit::multiply(sums[i], weights, values[i]);
        }
        KCCL_UNROLL
        for (uint32_t i = 0; i < kTiles; ++i) Unit::totals(sums[i], result.sums[i]);
        KCCL_UNROLL
        for (uint32_t i = 0; i < kEach; ++i) {
            result.maximums[i] = so_far[i].maximum;
            result.weights[i] = so_far[i].weight;
        }
    }

    // Replaces the scores of positions of a tile that a query does not see. Most tiles have none.
    KCCL_DECODE void hide_unseen(Float4 (&scores)[kEach], uint32_t at) const {
        const uint32_t first = at * kTileRows;
        if (first >= first_seen(latest_) && first + kTileRows <= earliest_) return;
        KCCL_UNROLL
        for (uint32_t i = 0; i < kEach; ++i) {
            KCCL_UNROLL
            for (uint32_t k = 0; k < 4; ++k) {
                const uint32_t seen = first + unit_.quad() * 4 + k;
                const bool is_seen = seen >= first_seen(mine_[i]) && seen < mine_[i];
                scores[i].value[k] = is_seen ? scores[i].value[k] : kNoPositions;
            }
        }
    }

    // Merges a position's partial result for itself into that of its KV strand, and clears the
    // lowest bits, as decode does.
    KCCL_DECODE void add_itself(Result& result, uint32_t kv_strand) const {
        KCCL_UNROLL
        for (uint32_t i = 0; i < kEach; ++i) {
            if (mine_[i] / kTileRows % S::kKvStrands == kv_strand) {
                const Float4 rest = mem::load_plain(own_[i] + Dims::kHeadFloat4s);
                const float maximum = result.maximums[i], weight = result.weights[i];
                KCCL_UNROLL
                for (uint32_t tile = 0; tile < kTiles; ++tile) {
                    const auto* const own = reinterpret_cast<const float*>(own_[i]) +
                                            (part_ * kTiles + tile) * kTileRows;
                    Float4 four;
                    KCCL_UNROLL
                    for (uint32_t k = 0; k < 4; ++k) {
                        four.value[k] = mem::load_plain(own + unit_.element(k));
                    }
                    take(result, tile, i,
                         merge({result.sums[tile][i], maximum, weight},
                               {four, rest.value[0], rest.value[1]}));
                }
            }
            result.maximums[i] = untagged(result.maximums[i]);
            result.weights[i] = untagged(result.weights[i]);
            KCCL_UNROLL
            for (uint32_t tile = 0; tile < kTiles; ++tile) {
                result.sums[tile][i] = untagged(result.sums[tile][i]);
            }
        }
    }

    KCCL_DECODE static void take(Result& result, uint32_t tile, uint32_t i,
                                 const Partial& partial) {
        result.sums[tile][i] = partial.sum;
        result.maximums[i] = partial.maximum;
        result.weights[i] = partial.weight;
    }

    // Returns where the first float4 of this thread's partial result of a level waits. The others
    // lie kWarpSize float4s apart.
    KCCL_DECODE Float4* waiting_at(uint32_t level) const {
        return area_ + level * Plan::kOfThread * platform::kWarpSize + mem::forget(warp().index());
    }
    KCCL_DECODE void keep_waiting(const Result& result, uint32_t level) const {
        Float4* to = waiting_at(level);
        KCCL_UNROLL
        for (uint32_t tile = 0; tile < kTiles; ++tile) {
            KCCL_UNROLL
            for (uint32_t i = 0; i < kEach; ++i) {
                mem::store_plain(to, result.sums[tile][i]);
                to += platform::kWarpSize;
            }
        }
        static_assert(kEach == 2, "a float4 has their maximums and weights");
        mem::store_plain(to, Float4{{result.maximums[0], result.maximums[1], result.weights[0],
                                     result.weights[1]}});
    }
    // Merges the partial result that waits at a level with `result` behind it. If there is none
    // behind it, `result` becomes the one that waits.
    KCCL_DECODE void merge_waiting(Result& result, uint32_t level, bool is_there) const {
        const Float4* from = waiting_at(level);
        const Float4 rest = mem::load_plain(from + (Plan::kOfThread - 1) * platform::kWarpSize);
        const Result behind = result;
        KCCL_UNROLL
        for (uint32_t tile = 0; tile < kTiles; ++tile) {
            KCCL_UNROLL
            for (uint32_t i = 0; i < kEach; ++i) {
                const Partial before = {mem::load_plain(from), rest.value[i],
                                        rest.value[kEach + i]};
                from += platform::kWarpSize;
                take(result, tile, i,
                     is_there ? merge(before,
                                      {behind.sums[tile][i], behind.maximums[i], behind.weights[i]})
                              : before);
            }
        }
    }
    KCCL_DECODE static void clear(Result& result) {
        result = {};
        for (float& maximum : result.maximums) maximum = kNoPositions;
    }

    // Stores the split's result of each query: the float4s of its part of the head, then {maximum,
    // weight, -, -}.
    KCCL_DECODE void store(const Result& result) const {
        KCCL_UNROLL
        for (uint32_t i = 0; i < kEach; ++i) {
            auto* const to = reinterpret_cast<float*>(area_ + unit_.query(i) * Plan::kOfQuery);
            KCCL_UNROLL
            for (uint32_t tile = 0; tile < kTiles; ++tile) {
                KCCL_UNROLL
                for (uint32_t k = 0; k < 4; ++k) {
                    mem::store_plain(to + tile * kTileRows + unit_.element(k),
                                     result.sums[tile][i].value[k]);
                }
            }
            if (unit_.quad() != 0) continue;
            mem::store_plain(to + 4 * Plan::kFloat4s, result.maximums[i]);
            mem::store_plain(to + 4 * Plan::kFloat4s + 1, result.weights[i]);
        }
    }

    const Unit unit_;
    Float4* const area_;
    const uint8_t* const cache_;
    const uint32_t part_;
    const uint32_t window_;
    const uint32_t earliest_;  // the position of the first query
    const uint32_t latest_;    // that of the last one
    uint32_t mine_[kEach];     // the positions of this thread's queries
    const StagedFloat4* staged_[kEach];
    const Float4* own_[kEach];                         // their partial results for themselves
    typename Unit::Tile keys_[Dims::kHeadTilesOfDim];  // of tile asked_
    uint32_t asked_ = kNoTile;
};

}  // namespace kccl::decode
