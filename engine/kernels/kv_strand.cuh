// Computes attention of several queries over one KV strand of their KV head, by one warp. A KV
// strand is every kKvStrands-th tile of 16 positions (shape.cuh). A query is a query head of one
// position. The warp goes from tile to tile, and multiplies as mma.cuh does: keys are the rows of a
// tile, and values, transposed, are its columns. A query's result does not depend on the other
// queries.
#pragma once

#include "partials.cuh"

namespace kccl::decode {

// Knows which part of NUM vectors this thread passes to the matrix unit (Mma::Lane in mma.cuh). The
// vectors lie `stride` float4s apart. If one multiplication does not take so many vectors, they are
// multiplied in several turns, and of(turn) returns the thread's part for one turn.
template <uint32_t NUM, bool HAS_TURNS = (NUM > Mma<f16>::kVectors)>
class Lanes {
  public:
    using Unit = Mma<f16>;
    static constexpr uint32_t kTurns = 1;

    KCCL_DECODE explicit Lanes(uint32_t stride) : lane_(NUM, stride) {}
    KCCL_DECODE const Unit::Lane& of(uint32_t) const { return lane_; }

  private:
    const Unit::Lane lane_;
};
template <uint32_t NUM>
class Lanes<NUM, true> {
  public:
    using Unit = Mma<f16>;
    static constexpr uint32_t kTurns = ceil_div(NUM, Unit::kVectors);

    KCCL_DECODE explicit Lanes(uint32_t stride)
        : lane_(Unit::kVectors, stride), last_(NUM - (kTurns - 1) * Unit::kVectors, stride) {}
    KCCL_DECODE const Unit::Lane& of(uint32_t turn) const {
        return turn + 1 < kTurns ? lane_ : last_;
    }

  private:
    const Unit::Lane lane_;
    const Unit::Lane last_;
};

// The shared memory of the block that a warp needs for the attention of NUM queries.
template <uint32_t NUM>
struct KvStrandArea {
    Float4 scores[NUM][kTileFloat4s];         // of the 16 positions of a tile
    StagedFloat4 weights[NUM][kTileFloat4s];  // 2^(score - maximum) of these positions
    Float4 scales[ceil_div(NUM, 4)];          // of each query: scales its sums to its new maximum
};

// This thread's part of the keys and values of 16 positions, in registers.
template <class S>
struct CacheTile {
    using Unit = Mma<f16>;
    static constexpr uint32_t kNum = Shape<S>::kHeadTilesOfDim;
    // Tells whether the keys are loaded while the warp still waits for its queries. The keys of
    // wide heads would take registers that the wait needs.
    static constexpr bool kLoadsAhead = kNum <= 4;

    KCCL_DECODE void load_keys(const Unit::Lane& unit, const uint8_t* cached) {
        KCCL_UNROLL
        for (uint32_t i = 0; i < kNum; ++i) keys[i] = unit.weights(cached + i * kTileBytes);
    }
    KCCL_DECODE void load_values(const Unit::Lane& unit, const uint8_t* cached) {
        KCCL_UNROLL
        for (uint32_t i = 0; i < kNum; ++i) {
            values[i] = unit.weights(cached + (kNum + i) * kTileBytes);
        }
    }

    Unit::Weights keys[kNum];
    Unit::Weights values[kNum];
};

// The maximum and the weight (Partial) of a query over the tiles so far. Four neighbouring threads
// have a query, each of them the scores of four positions of a tile.
struct ScoresSoFar {
    // Adds the scores of a tile, and replaces them by weights. Scores of positions that the query
    // does not see must be kNoPositions. Returns the factor by which the caller must multiply its
    // sums so far. Called by all threads of the warp.
    KCCL_DECODE float add(Float4& scores) {
        const float peak =
            rounded(over_tile(scores, [](float a, float b) { return a < b ? b : a; }));
        const float most = peak < maximum ? maximum : peak;
        const float scale = power_of_two(maximum - most);
        KCCL_UNROLL
        for (float& value : scores.value) {
            value = value == kNoPositions ? 0.0f : exponential2(value - most);
        }
        weight = weight * scale + over_tile(scores, [](float a, float b) { return a + b; });
        maximum = most;
        return scale;
    }

    float maximum = kNoPositions;
    float weight = 0;

  private:
    // Returns f, a maximum or a sum, over a query's values of the tile's 16 positions. All four
    // threads get it.
    template <class F>
    KCCL_DECODE static float over_tile(const Float4& four, F f) {
        const float value = f(f(four.value[0], four.value[1]), f(four.value[2], four.value[3]));
        return platform::reduce_lanes<kTileFloat4s>(value, f);
    }
};

// Adds up the attention of NUM queries over a KV strand. All threads of a warp make an object, and
// call each function together.
template <class S, uint32_t NUM>
class KvStrand {
  public:
    using Dims = Shape<S>;
    using Unit = Mma<f16>;
    static constexpr uint32_t kTurns = Lanes<NUM>::kTurns;
    using Queries = typename Unit::Inputs[kTurns][Dims::kHeadTilesOfDim];

    // lanes: made with a stride of kTileFloat4s, as the weights in KvStrandArea lie.
    KCCL_DECODE KvStrand(KvStrandArea<NUM>& area, const Lanes<NUM>& lanes)
        : area_(area), lanes_(lanes) {}

    // Loads this thread's part of NUM staged queries into registers. They lie kHeadFloat4s apart.
    KCCL_DECODE static void load(Queries& queries, const StagedFloat4* staged) {
        const Lanes<NUM> lanes(Dims::kHeadFloat4s);
        KCCL_UNROLL
        for (uint32_t turn = 0; turn < kTurns; ++turn) {
            KCCL_UNROLL
            for (uint32_t i = 0; i < Dims::kHeadTilesOfDim; ++i) {
                queries[turn][i] = lanes.of(turn).inputs(
                    staged + turn * Unit::kVectors * Dims::kHeadFloat4s + i * kTileFloat4s);
            }
        }
    }

    // Adds the positions of a tile of the cache to the attention of each query, as far as the query
    // sees them: is_seen(query, number of the position in the tile) tells that.
    template <class IsSeen>
    KCCL_DECODE void add(const CacheTile<S>& tile, const Queries& queries, IsSeen is_seen) {
        auto* const by_position = reinterpret_cast<float*>(area_.scores);
        KCCL_UNROLL
        for (uint32_t turn = 0; turn < kTurns; ++turn) {
            typename Unit::Sums scores = {};
            KCCL_UNROLL
            for (uint32_t i = 0; i < Dims::kHeadTilesOfDim; ++i) {
                Unit::multiply(scores, tile.keys[i], queries[turn][i]);
            }
            lanes_.of(turn).totals(scores, [&](uint32_t row, uint32_t vector, float score) {
                const uint32_t query = turn * Unit::kVectors + vector;
                if (row < kTileRows && query < NUM) {
                    const uint32_t at = query * kTileRows + Unit::position_of(row);
                    mem::store_plain(by_position + at, score);
                }
            });
        }
        warp().sync();
        // Each thread handles one query's scores of four positions.
        const uint32_t number = thread(), query = number / kTileFloat4s,
                       index4 = number % kTileFloat4s;
        const bool has_float4 = number < NUM * kTileFloat4s;
        Float4 now = {};
        if (has_float4) now = mem::load_plain(area_.scores[0] + number);
        KCCL_UNROLL
        for (uint32_t i = 0; i < 4; ++i) {
            const bool takes = has_float4 && is_seen(query, index4 * 4 + i);
            now.value[i] = takes ? now.value[i] : kNoPositions;
        }
        const float scale = scores_.add(now);
        // The weights and scales of the last tile may be overwritten: all threads have read them,
        // because they have met above.
        if (has_float4) {
            area_.weights[0][number] = split<f16>(now);
            if (index4 == 0) mem::store_plain(area_.scales[0].value + query, scale);
        }
        // After this sync, all threads have read their scores, so the next tile's scores may
        // overwrite them, and all weights and scales are stored.
        warp().sync();
        KCCL_UNROLL
        for (uint32_t turn = 0; turn < kTurns; ++turn) {
            const uint32_t first = turn * Unit::kVectors;
            const auto& lane = lanes_.of(turn);
            const typename Unit::Inputs weights = lane.inputs(area_.weights[first]);
            KCCL_UNROLL
            for (uint32_t i = 0; i < Dims::kHeadTilesOfDim; ++i) {
                lane.scale(sums_[turn][i], area_.scales[0].value + first);
                Unit::multiply(sums_[turn][i], tile.values[i], weights);
            }
        }
    }

    // Stores the partial result of each query: the float4s of a head, then {maximum, weight, -, -}.
    KCCL_DECODE void store(Float4 (*partials)[Dims::kPartialFloat4s]) const {
        KCCL_UNROLL
        for (uint32_t turn = 0; turn < kTurns; ++turn) {
            KCCL_UNROLL
            for (uint32_t i = 0; i < Dims::kHeadTilesOfDim; ++i) {
                lanes_.of(turn).totals(sums_[turn][i],
                                       [&](uint32_t row, uint32_t vector, float sum) {
                                           const uint32_t query = turn * Unit::kVectors + vector;
                                           if (row >= kTileRows || query >= NUM) return;
                                           auto* values = reinterpret_cast<float*>(partials[query]);
                                           mem::store_plain(values + i * kTileRows + row, sum);
                                       });
            }
        }
        const uint32_t number = thread();
        if (number >= NUM * kTileFloat4s || number % kTileFloat4s != 0) return;
        float* const rest = partials[number / kTileFloat4s][Dims::kHeadFloat4s].value;
        mem::store_plain(rest, scores_.maximum);
        mem::store_plain(rest + 1, scores_.weight);
    }

  private:
    static_assert(NUM * kTileFloat4s <= platform::kWarpSize, "a thread for each float4 of scores");

    KCCL_DECODE static uint32_t thread() { return mem::forget(warp().index()); }

    KvStrandArea<NUM>& area_;
    const Lanes<NUM>& lanes_;
    // scores_ belongs to the query whose scores this thread handles in add(). sums_ is this
    // thread's part of the weighted sums of all queries.
    ScoresSoFar scores_;
    typename Unit::Sums sums_[kTurns][Dims::kHeadTilesOfDim] = {};
};

}  // namespace kccl::decode
