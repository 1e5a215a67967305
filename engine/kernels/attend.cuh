// Attention of one position over all before it, and over itself. A unit is one KV head and one part
// of its strands (shape.cuh); a block takes the units member, member + kGroupBlocks, ... A warp
// goes through a strand tile by tile, 16 positions at a time, with the products of mma.cuh: keys
// are a tile's rows, and values, turned, its columns.
//
// The cache is f16. A block writes and reads its own strands only, and a warp its own tiles, so
// that nothing must be handed over. The position itself is a part of its own, merged by the warp
// that puts it into the cache: so no warp waits for what was just written.
#pragma once

#include "parts.cuh"
#include "vectors.cuh"

namespace kccl::decode {

// A warp's memory in its area. The queries are where products have their vectors.
template <class S>
struct AttendArea {
    Quad scores[Shape<S>::kHeadsPerKv][kTileQuads];  // by position
    StagedQuad weights[Shape<S>::kHeadsPerKv][kTileQuads];
    Quad scales;  // by query head
};

// Norm and RoPE of a head; this thread has one of its quads, or none, and then zeros.
template <class S>
KCCL_DEVICE Quad turned(const Worker<S>& worker, Quad quad, uint32_t layer, bool is_key,
                        uint32_t position) {
    const uint32_t at = worker.thread();
    const bool is_there = at < Shape<S>::kHeadQuads;
    if constexpr (S::kHasQkNorm) {
        float squares = 0;
        for (const float value : quad.value) squares += value * value;
        squares = sum_of_warp(squares);
        const float inverse = 1.0f / platform::square_root(squares / S::kHeadDim + S::kNormEps);
        const uint64_t row = 2 * layer + (is_key ? 1 : 0);
        const Quad norm =
            load_quad(worker.task().qk_norms, row * Shape<S>::kHeadQuads + (is_there ? at : 0));
        KCCL_UNROLL
        for (int i = 0; i < 4; ++i) quad.value[i] = quad.value[i] * inverse * norm.value[i];
    }
    if (!is_there) return quad;
    const uint64_t pair = uint64_t{position} * (S::kHeadDim / 2) + 2 * at;
    const auto* cosines = reinterpret_cast<const float*>(worker.task().cosines) + pair;
    const auto* sines = reinterpret_cast<const float*>(worker.task().sines) + pair;
    Quad result;
    KCCL_UNROLL
    for (int i = 0; i < 2; ++i) {
        const float cosine = mem::load_plain(cosines + i), sine = mem::load_plain(sines + i);
        const float a = quad.value[2 * i], b = quad.value[2 * i + 1];
        result.value[2 * i] = a * cosine - b * sine;
        result.value[2 * i + 1] = a * sine + b * cosine;
    }
    return result;
}

// Half precision, at most its largest number.
KCCL_DEVICE uint16_t cached(float value) {
    constexpr float kMost = 65504.0f;
    return Element<f16>::narrow(value > kMost ? kMost : value < -kMost ? -kMost : value).bits;
}

// One unit's attention for one position.
template <class S>
class Attention {
  public:
    using Dims = Shape<S>;
    using Unit = Mma<f16>;

    KCCL_DEVICE Attention(Worker<S>& worker, uint32_t layer, uint32_t window, uint32_t unit,
                          uint32_t position)
        : worker_(worker),
          layer_(layer),
          position_(position),
          first_position_(window != 0 && position >= window ? position - window + 1 : 0),
          lane_(unit / S::kSplits / S::kKvHeads),
          kv_head_(unit / S::kSplits % S::kKvHeads),
          split_(unit % S::kSplits),
          unit_(Dims::kHeadsPerKv, kTileQuads),
          area_(*reinterpret_cast<AttendArea<S>*>(worker.area(worker.warp_index()))) {
        const uint64_t head = uint64_t{layer} * Dims::kLanesHere * S::kKvHeads +
                              (worker.group() * Dims::kGroupLanes + lane_) * S::kKvHeads + kv_head_;
        cache_ = reinterpret_cast<uint8_t*>(worker.task().cache) +
                 head * Dims::kCacheTiles * Dims::kCacheTileBytes;
    }

    // Goes through this warp's strands, and stores their parts. All threads of the warp.
    KCCL_DEVICE void run() {
        if (worker_.warp_index() >= Dims::kSplitStrands) return;
        // The first tile is on its way while the queries are.
        prefetch(first_tile(worker_.warp_index()));
        stage_queries();
        worker_.stamp(kArrived);
#pragma unroll 1
        for (uint32_t i = worker_.warp_index(); i < Dims::kSplitStrands; i += S::kWarps) {
            const bool is_last =
                split_ * Dims::kSplitStrands + i == position_ / kTileRows % S::kStrands;
            Part own[Dims::kHeadsPerKv];
            if (is_last) append(own);
            run_strand(i);
            if (is_last) merge_with(i, own);
        }
    }

    // Merges the strands and publishes the result. All warps, when they have met.
    KCCL_DEVICE void publish() {
        constexpr uint32_t kQuads = Dims::kHeadsPerKv * Dims::kPartQuads;
        KCCL_UNROLL
        for (uint32_t k = 0; k < ceil_div(kQuads, Dims::kConsumers); ++k) {
            const uint32_t quad = own_quad(worker_, k);
            if (quad >= kQuads) break;
            const uint32_t head = quad / Dims::kPartQuads, at = quad % Dims::kPartQuads;
            Part parts[Dims::kSplitStrands];
            KCCL_UNROLL
            for (uint32_t i = 0; i < Dims::kSplitStrands; ++i) {
                const Quad* part = worker_.shared().parts[i][head];
                const Quad rest = mem::load_plain(part + Dims::kHeadQuads);
                parts[i] = {untagged(mem::load_plain(part + at)), untagged(rest.value[0]),
                            untagged(rest.value[1])};
            }
            const Part whole = merge_all<Dims::kSplitStrands>(parts);
            const uint32_t place = Places<S>::attended(layer_, worker_.first_lane() + lane_,
                                                       kv_head_ * Dims::kHeadsPerKv + head) +
                                   split_ * Dims::kPartQuads + at;
            const bool is_rest = at == Dims::kHeadQuads;
            worker_.publish(place, is_rest ? Quad{{whole.maximum, whole.weight, 0, 0}} : whole.sum);
        }
    }

  private:
    KCCL_DEVICE uint8_t* tile_at(uint32_t index) const {
        return cache_ + uint64_t{index} * Dims::kCacheTileBytes;
    }

    // The first tile that the query sees, of strand i of this split.
    KCCL_DEVICE uint32_t first_tile(uint32_t i) const {
        const uint32_t first = first_position_ / kTileRows;
        const uint32_t strand = split_ * Dims::kSplitStrands + i;
        return first + (strand + S::kStrands - first % S::kStrands) % S::kStrands;
    }
    // Behind the last tile with positions before this one.
    KCCL_DEVICE uint32_t end_of_tiles() const { return ceil_div(position_, kTileRows); }

    // Asks for a tile's keys and values.
    KCCL_DEVICE void prefetch(uint32_t at) const {
        if (at >= end_of_tiles()) return;
        for (uint32_t line = worker_.thread(); line < Dims::kCacheTileBytes / kKcclLineBytes;
             line += platform::kWarpSize) {
            mem::prefetch(tile_at(at) + line * kKcclLineBytes);
        }
    }

    // Polls for this KV head's queries, key and value; stages the queries.
    KCCL_DEVICE void stage_queries() {
        constexpr int kNum = Dims::kHeadsPerKv + 2;
        uint32_t places[kNum];
        Quad heads[kNum];
        const bool is_there = worker_.thread() < Dims::kHeadQuads;
        KCCL_UNROLL
        for (int i = 0; i < kNum; ++i) {
            const uint32_t head = i < kNum - 2    ? kv_head_ * Dims::kHeadsPerKv + i
                                  : i == kNum - 2 ? S::kHeads + kv_head_
                                                  : S::kHeads + S::kKvHeads + kv_head_;
            places[i] = Places<S>::qkv(layer_, worker_.first_lane() + lane_) +
                        head * Dims::kHeadQuads + (is_there ? worker_.thread() : 0);
        }
        worker_.template await<mem::Scope::kDevice>(places, is_there ? ~0u : 0,
                                                    tag_of(worker_.round()), heads);
        KCCL_UNROLL
        for (uint32_t head = 0; head < Dims::kHeadsPerKv; ++head) {
            Quad& quad = own_queries_[head];
            quad = turned(worker_, heads[head], layer_, false, position_);
            for (float& value : quad.value) value *= S::kAttentionScale * kLog2E;
            if (is_there) {
                worker_.staged()[head * Dims::kHeadQuads + worker_.thread()] = split<f16>(quad);
            }
        }
        own_key_ = turned(worker_, heads[kNum - 2], layer_, true, position_);
        own_value_ = heads[kNum - 1];
        warp().sync();
        const typename Unit::Lane by_head(Dims::kHeadsPerKv, Dims::kHeadQuads);
        KCCL_UNROLL
        for (uint32_t i = 0; i < Dims::kHeadTilesOfDim; ++i) {
            queries_[i] = by_head.inputs(worker_.staged() + i * kTileQuads);
        }
    }

    // Writes the position's key and value into the cache; own[i] becomes its part for query head i.
    KCCL_DEVICE void append(Part (&own)[Dims::kHeadsPerKv]) {
        const bool is_there = worker_.thread() < Dims::kHeadQuads;
        uint8_t* const keys = tile_at(position_ / kTileRows);
        uint8_t* const values = keys + Dims::kHeadTilesOfDim * kTileBytes;
        const uint32_t at = position_ % kTileRows;
        Quad key = {}, value = {};
        KCCL_UNROLL
        for (uint32_t i = 0; i < 4; ++i) {
            const uint16_t key_bits = cached(own_key_.value[i]);
            const uint16_t value_bits = cached(own_value_.value[i]);
            key.value[i] = Element<f16>::widen(f16{key_bits});
            value.value[i] = Element<f16>::widen(f16{value_bits});
            const uint32_t dim = worker_.thread() * 4 + i;
            const uint32_t part = dim / kTileColumns * kTileBytes, in_tile = dim % kTileColumns;
            if (!is_there) continue;
            mem::store_plain(reinterpret_cast<uint16_t*>(keys + part + Unit::offset(at, in_tile)),
                             key_bits);
            mem::store_plain(reinterpret_cast<uint16_t*>(values + part + Unit::offset(in_tile, at)),
                             value_bits);
        }
        KCCL_UNROLL
        for (uint32_t head = 0; head < Dims::kHeadsPerKv; ++head) {
            float score = 0;
            KCCL_UNROLL
            for (int i = 0; i < 4; ++i) score += own_queries_[head].value[i] * key.value[i];
            score = sum_of_warp(is_there ? score : 0.0f);
            const float maximum = rounded(score);
            const float weight = exponential2(score - maximum);
            own[head] = {value, maximum, weight};
            for (float& each : own[head].sum.value) each *= weight;
        }
        // The strand's last tile has the position too. It is read with it, and leaves it out.
        warp().sync();
    }

    // Merges the position's part with that of strand i.
    KCCL_DEVICE void merge_with(uint32_t index, const Part (&own)[Dims::kHeadsPerKv]) {
        const bool is_there = worker_.thread() < Dims::kHeadQuads;
        warp().sync();
        KCCL_UNROLL
        for (uint32_t head = 0; head < Dims::kHeadsPerKv; ++head) {
            Quad* const part = worker_.shared().parts[index][head];
            const Quad rest = mem::load_plain(part + Dims::kHeadQuads);
            Part before = {Quad{}, rest.value[0], rest.value[1]};
            if (is_there) before.sum = mem::load_plain(part + worker_.thread());
            const Part both = merge(before, own[head]);
            warp().sync();
            if (is_there) mem::store_plain(part + worker_.thread(), both.sum);
            if (worker_.thread() == 0) {
                mem::store_plain(part + Dims::kHeadQuads, Quad{{both.maximum, both.weight, 0, 0}});
            }
        }
    }

    // One of the kSlots (query head, position in the tile) pairs that a thread looks at.
    static constexpr uint32_t kPairs = Dims::kHeadsPerKv * kTileRows;
    static constexpr uint32_t kSlots = ceil_div(kPairs, platform::kWarpSize);

    // The largest value, or the sum, over the 16 threads that have a head's positions.
    template <class F>
    KCCL_DEVICE static float over_tile(float value, F f) {
        KCCL_UNROLL
        for (uint32_t step = kTileRows / 2; step > 0; step /= 2) {
            value = f(value, platform::shuffle(value, warp().index() ^ step));
        }
        return value;
    }

    KCCL_DEVICE void run_strand(uint32_t index) {
        float maximum[kSlots], weight[kSlots];
        KCCL_UNROLL
        for (uint32_t slot = 0; slot < kSlots; ++slot) {
            maximum[slot] = kNoPositions;
            weight[slot] = 0;
        }
        Unit::Sums sums[Dims::kHeadTilesOfDim] = {};
#pragma unroll 1
        for (uint32_t at = first_tile(index); at < end_of_tiles(); at += S::kStrands) {
            prefetch(at + S::kStrands);
            run_tile(at, maximum, weight, sums);
        }
        store(index, maximum, weight, sums);
    }

    KCCL_DEVICE void run_tile(uint32_t at, float (&maximum)[kSlots], float (&weight)[kSlots],
                              typename Unit::Sums (&sums)[Dims::kHeadTilesOfDim]) {
        const uint8_t* const keys = tile_at(at);
        const uint8_t* const values = keys + Dims::kHeadTilesOfDim * kTileBytes;
        typename Unit::Sums scores = {};
        KCCL_UNROLL
        for (uint32_t i = 0; i < Dims::kHeadTilesOfDim; ++i) {
            Unit::multiply(scores, unit_.weights(keys + i * kTileBytes), queries_[i]);
        }
        auto* const by_position = reinterpret_cast<float*>(area_.scores);
        unit_.totals(scores, [&](uint32_t row, uint32_t head, float score) {
            if (row < kTileRows && head < Dims::kHeadsPerKv) {
                mem::store_plain(by_position + head * kTileRows + row, score);
            }
        });
        warp().sync();
        float scores_now[kSlots];
        KCCL_UNROLL
        for (uint32_t slot = 0; slot < kSlots; ++slot) {
            const uint32_t pair = worker_.thread() + slot * platform::kWarpSize;
            const uint32_t position = at * kTileRows + pair % kTileRows;
            const bool is_seen =
                pair < kPairs && position >= first_position_ && position < position_;
            scores_now[slot] = is_seen ? mem::load_plain(by_position + pair) : kNoPositions;
        }
        warp().sync();
        KCCL_UNROLL
        for (uint32_t slot = 0; slot < kSlots; ++slot) {
            const uint32_t pair = worker_.thread() + slot * platform::kWarpSize;
            const float score = scores_now[slot];
            const float peak = over_tile(score, [](float a, float b) { return a < b ? b : a; });
            const float integer = rounded(peak);
            const float now = integer < maximum[slot] ? maximum[slot] : integer;
            const float scale = power_of_two(maximum[slot] - now);
            const float e = score == kNoPositions ? 0.0f : exponential2(score - now);
            weight[slot] =
                weight[slot] * scale + over_tile(e, [](float a, float b) { return a + b; });
            maximum[slot] = now;
            if (pair < kPairs) {
                mem::store_plain(by_position + pair, e);
                if (pair % kTileRows == 0) {
                    mem::store_plain(area_.scales.value + pair / kTileRows, scale);
                }
            }
        }
        warp().sync();
        if (worker_.thread() < Dims::kHeadsPerKv * kTileQuads) {
            const Quad quad = mem::load_plain(area_.scores[0] + worker_.thread());
            area_.weights[0][worker_.thread()] = split<f16>(quad);
        }
        warp().sync();
        const typename Unit::Inputs weights = unit_.inputs(area_.weights[0]);
        KCCL_UNROLL
        for (uint32_t i = 0; i < Dims::kHeadTilesOfDim; ++i) {
            unit_.scale(sums[i], area_.scales.value);
            Unit::multiply(sums[i], unit_.weights(values + i * kTileBytes), weights);
        }
        // Before the next tile's scores come.
        warp().sync();
    }

    KCCL_DEVICE void store(uint32_t index, const float (&maximum)[kSlots],
                           const float (&weight)[kSlots],
                           const typename Unit::Sums (&sums)[Dims::kHeadTilesOfDim]) {
        auto& parts = worker_.shared().parts[index];
        KCCL_UNROLL
        for (uint32_t i = 0; i < Dims::kHeadTilesOfDim; ++i) {
            unit_.totals(sums[i], [&](uint32_t row, uint32_t head, float sum) {
                if (row >= kTileRows || head >= Dims::kHeadsPerKv) return;
                auto* values = reinterpret_cast<float*>(parts[head]);
                mem::store_plain(values + i * kTileRows + row, sum);
            });
        }
        KCCL_UNROLL
        for (uint32_t slot = 0; slot < kSlots; ++slot) {
            const uint32_t pair = worker_.thread() + slot * platform::kWarpSize;
            if (pair >= kPairs || pair % kTileRows != 0) continue;
            float* const rest = parts[pair / kTileRows][Dims::kHeadQuads].value;
            mem::store_plain(rest, maximum[slot]);
            mem::store_plain(rest + 1, weight[slot]);
        }
    }

    Worker<S>& worker_;
    const uint32_t layer_;
    const uint32_t position_;
    const uint32_t first_position_;  // that the query sees
    const uint32_t lane_;            // of the group
    const uint32_t kv_head_;         // of the lane
    const uint32_t split_;
    const typename Unit::Lane unit_;  // for weights of positions
    AttendArea<S>& area_;
    uint8_t* cache_;
    typename Unit::Inputs queries_[Dims::kHeadTilesOfDim];
    // This thread's quads.
    Quad own_queries_[Dims::kHeadsPerKv];
    Quad own_key_;
    Quad own_value_;
};

// Called by all warps that multiply. False: a wait failed.
template <class S>
KCCL_DEVICE bool attend(Worker<S>& worker, uint32_t layer, uint32_t window, uint32_t position) {
    static_assert(sizeof(AttendArea<S>) <= Shape<S>::kMostSums * sizeof(Quad), "fits");
    for (uint32_t unit = worker.member(); unit < Shape<S>::kUnits; unit += Shape<S>::kGroupBlocks) {
        worker.next_op();
        Attention<S> attention(worker, layer, window, unit, position);
        attention.run();
        worker.stamp(kMultiplied);
        if (!worker.meet()) return false;
        worker.stamp(kMet);
        attention.publish();
        // The next unit's parts come to the same place.
        if (Shape<S>::kUnits > Shape<S>::kGroupBlocks && !worker.meet()) return false;
    }
    worker.end_op();
    return true;
}

}  // namespace kccl::decode
