// A warp's way through one strand of the positions, for several queries of a KV head at a time: a
// query head of a position each. Tile after tile, with the products of mma.cuh: keys are a tile's
// rows, and values, turned, its columns. What a query gets does not depend on the others.
#pragma once

#include "parts.cuh"

namespace kccl::decode {

// A warp's memory in block-shared memory, for NUM queries.
template <uint32_t NUM>
struct StrandArea {
    Quad scores[NUM][kTileQuads];  // by position
    StagedQuad weights[NUM][kTileQuads];
    Quad scales[ceil_div(NUM, 4)];  // by query
};

// This thread's part of the keys and values of 16 positions, in registers.
template <class S>
struct CacheTile {
    using Unit = Mma<f16>;
    static constexpr uint32_t kNum = Shape<S>::kHeadTilesOfDim;
    // Whether the keys are loaded while the warp still waits for its queries. The keys of wider
    // heads would take registers that the wait needs.
    static constexpr bool kLoadsAhead = kNum <= 4;

    KCCL_DEVICE void load_keys(const Unit::Lane& unit, const uint8_t* cached) {
        KCCL_UNROLL
        for (uint32_t i = 0; i < kNum; ++i) keys[i] = unit.weights(cached + i * kTileBytes);
    }
    KCCL_DEVICE void load_values(const Unit::Lane& unit, const uint8_t* cached) {
        KCCL_UNROLL
        for (uint32_t i = 0; i < kNum; ++i) {
            values[i] = unit.weights(cached + (kNum + i) * kTileBytes);
        }
    }

    Unit::Weights keys[kNum];
    Unit::Weights values[kNum];
};

// All threads of a warp make one, and call all functions.
template <class S, uint32_t NUM>
class Strand {
  public:
    using Dims = Shape<S>;
    using Unit = Mma<f16>;
    using Queries = typename Unit::Inputs[Dims::kHeadTilesOfDim];
    static_assert(NUM <= Unit::kVectors, "one multiplication for all queries");

    // unit: that of NUM vectors, kTileQuads apart.
    KCCL_DEVICE Strand(StrandArea<NUM>& area, const typename Unit::Lane& unit)
        : area_(area), unit_(unit) {
        KCCL_UNROLL
        for (uint32_t slot = 0; slot < kSlots; ++slot) {
            maximum_[slot] = kNoPositions;
            weight_[slot] = 0;
        }
    }

    // Adds the positions of a tile of the cache for which is_seen(query, position in the tile).
    template <class IsSeen>
    KCCL_DEVICE void add(const CacheTile<S>& tile, const Queries& queries, IsSeen is_seen) {
        typename Unit::Sums scores = {};
        KCCL_UNROLL
        for (uint32_t i = 0; i < Dims::kHeadTilesOfDim; ++i) {
            Unit::multiply(scores, tile.keys[i], queries[i]);
        }
        auto* const by_position = reinterpret_cast<float*>(area_.scores);
        unit_.totals(scores, [&](uint32_t row, uint32_t query, float score) {
            if (row < kTileRows && query < NUM) {
                mem::store_plain(by_position + query * kTileRows + row, score);
            }
        });
        warp().sync();
        float scores_now[kSlots];
        KCCL_UNROLL
        for (uint32_t slot = 0; slot < kSlots; ++slot) {
            const uint32_t pair = thread() + slot * platform::kWarpSize;
            const bool takes = pair < kPairs && is_seen(pair / kTileRows, pair % kTileRows);
            scores_now[slot] = takes ? mem::load_plain(by_position + pair) : kNoPositions;
        }
        warp().sync();
        KCCL_UNROLL
        for (uint32_t slot = 0; slot < kSlots; ++slot) {
            const uint32_t pair = thread() + slot * platform::kWarpSize;
            const float score = scores_now[slot];
            const float peak = over_tile(score, [](float a, float b) { return a < b ? b : a; });
            const float integer = rounded(peak);
            const float now = integer < maximum_[slot] ? maximum_[slot] : integer;
            const float scale = power_of_two(maximum_[slot] - now);
            const float e = score == kNoPositions ? 0.0f : exponential2(score - now);
            weight_[slot] =
                weight_[slot] * scale + over_tile(e, [](float a, float b) { return a + b; });
            maximum_[slot] = now;
            if (pair < kPairs) {
                mem::store_plain(by_position + pair, e);
                if (pair % kTileRows == 0) {
                    mem::store_plain(area_.scales[0].value + pair / kTileRows, scale);
                }
            }
        }
        warp().sync();
        if (thread() < NUM * kTileQuads) {
            const Quad quad = mem::load_plain(area_.scores[0] + thread());
            area_.weights[0][thread()] = split<f16>(quad);
        }
        warp().sync();
        const typename Unit::Inputs weights = unit_.inputs(area_.weights[0]);
        KCCL_UNROLL
        for (uint32_t i = 0; i < Dims::kHeadTilesOfDim; ++i) {
            unit_.scale(sums_[i], area_.scales[0].value);
            Unit::multiply(sums_[i], tile.values[i], weights);
        }
        // Before the next tile's scores come.
        warp().sync();
    }

    // Stores the parts of all queries: the quads of a head, then {maximum, weight, -, -}.
    KCCL_DEVICE void store(Quad (*parts)[Dims::kPartQuads]) const {
        KCCL_UNROLL
        for (uint32_t i = 0; i < Dims::kHeadTilesOfDim; ++i) {
            unit_.totals(sums_[i], [&](uint32_t row, uint32_t query, float sum) {
                if (row >= kTileRows || query >= NUM) return;
                auto* values = reinterpret_cast<float*>(parts[query]);
                mem::store_plain(values + i * kTileRows + row, sum);
            });
        }
        KCCL_UNROLL
        for (uint32_t slot = 0; slot < kSlots; ++slot) {
            const uint32_t pair = thread() + slot * platform::kWarpSize;
            if (pair >= kPairs || pair % kTileRows != 0) continue;
            float* const rest = parts[pair / kTileRows][Dims::kHeadQuads].value;
            mem::store_plain(rest, maximum_[slot]);
            mem::store_plain(rest + 1, weight_[slot]);
        }
    }

  private:
    // A thread looks at so many (query, position in the tile) pairs.
    static constexpr uint32_t kPairs = NUM * kTileRows;
    static constexpr uint32_t kSlots = ceil_div(kPairs, platform::kWarpSize);

    KCCL_DEVICE static uint32_t thread() { return mem::forget(warp().index()); }

    // The largest value, or the sum, over the 16 threads that have a query's positions.
    template <class F>
    KCCL_DEVICE static float over_tile(float value, F f) {
        return platform::reduce_lanes<kTileRows>(value, f);
    }

    StrandArea<NUM>& area_;
    const typename Unit::Lane& unit_;
    float maximum_[kSlots];
    float weight_[kSlots];
    typename Unit::Sums sums_[Dims::kHeadTilesOfDim] = {};
};

}  // namespace kccl::decode
