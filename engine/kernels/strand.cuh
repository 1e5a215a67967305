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
        : area_(area), unit_(unit) {}

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
        // A thread looks at a query's scores of four positions.
        const uint32_t number = thread(), query = number / kTileQuads, quad = number % kTileQuads;
        const bool has_quad = number < NUM * kTileQuads;
        Quad now = {};
        if (has_quad) now = mem::load_plain(area_.scores[0] + number);
        KCCL_UNROLL
        for (uint32_t i = 0; i < 4; ++i) {
            const bool takes = has_quad && is_seen(query, quad * 4 + i);
            now.value[i] = takes ? now.value[i] : kNoPositions;
        }
        const float peak = rounded(over_tile(now, [](float a, float b) { return a < b ? b : a; }));
        const float maximum = peak < maximum_ ? maximum_ : peak;
        const float scale = power_of_two(maximum_ - maximum);
        KCCL_UNROLL
        for (float& value : now.value) {
            value = value == kNoPositions ? 0.0f : exponential2(value - maximum);
        }
        weight_ = weight_ * scale + over_tile(now, [](float a, float b) { return a + b; });
        maximum_ = maximum;
        // All threads have read the weights and scales of the tile before: they have met above.
        if (has_quad) {
            area_.weights[0][number] = split<f16>(now);
            if (quad == 0) mem::store_plain(area_.scales[0].value + query, scale);
        }
        // Behind this, the next tile's scores may come.
        warp().sync();
        const typename Unit::Inputs weights = unit_.inputs(area_.weights[0]);
        KCCL_UNROLL
        for (uint32_t i = 0; i < Dims::kHeadTilesOfDim; ++i) {
            unit_.scale(sums_[i], area_.scales[0].value);
            Unit::multiply(sums_[i], tile.values[i], weights);
        }
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
        const uint32_t number = thread();
        if (number >= NUM * kTileQuads || number % kTileQuads != 0) return;
        float* const rest = parts[number / kTileQuads][Dims::kHeadQuads].value;
        mem::store_plain(rest, maximum_);
        mem::store_plain(rest + 1, weight_);
    }

  private:
    static_assert(NUM * kTileQuads <= platform::kWarpSize, "a thread for each quad of scores");

    KCCL_DEVICE static uint32_t thread() { return mem::forget(warp().index()); }

    // The largest value, or the sum, over the positions of the tile; each of the four threads that
    // have a query's gets it.
    template <class F>
    KCCL_DEVICE static float over_tile(const Quad& quad, F f) {
        const float value = f(f(quad.value[0], quad.value[1]), f(quad.value[2], quad.value[3]));
        return platform::reduce_lanes<kTileQuads>(value, f);
    }

    StrandArea<NUM>& area_;
    const typename Unit::Lane& unit_;
    // Of this thread's query.
    float maximum_ = kNoPositions;
    float weight_ = 0;
    typename Unit::Sums sums_[Dims::kHeadTilesOfDim] = {};
};

}  // namespace kccl::decode
