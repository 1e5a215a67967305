// Attention of one position over all before it, and over itself. A unit is one KV head and one
// split of its strands (shape.cuh); a block takes the units member, member + kGroupBlocks, ... A
// warp goes through a strand tile by tile, 16 positions at a time (strand.cuh). Each split gives a
// part of the result. With S::kMergesFirst, the blocks of a KV head exchange their parts, and each
// block merges its share of the head's elements. Without it, the output projection merges them
// (out.cuh).
//
// The cache is f16. A block writes and reads its own strands only, and a warp its own tiles, so
// that nothing must be handed over. The position itself is a part of its own, which another warp
// computes: so no warp waits for what was just written. It is merged with its strand's part.
#pragma once

#include "strand.cuh"
#include "vectors.cuh"

namespace kccl::decode {

// Norm and RoPE of a head; this thread has one of its quads, or none, and then zeros. cosines,
// sines: of the position.
template <class S>
KCCL_DEVICE Quad turned(const Task& task, Quad quad, uint32_t layer, bool is_key,
                        const float* cosines, const float* sines) {
    const uint32_t at = mem::forget(warp().index());
    const bool is_there = at < Shape<S>::kHeadQuads;
    if constexpr (S::kHasQkNorm) {
        float squares = 0;
        for (const float value : quad.value) squares += value * value;
        squares = sum_of_warp(squares);
        const float inverse = reciprocal_root(squares * (1.0f / S::kHeadDim) + S::kNormEps);
        const uint64_t row = 2 * layer + (is_key ? 1 : 0);
        const Quad norm =
            load_quad(task.qk_norms, row * Shape<S>::kHeadQuads + (is_there ? at : 0));
        KCCL_UNROLL
        for (int i = 0; i < 4; ++i) quad.value[i] = quad.value[i] * inverse * norm.value[i];
    }
    if (!is_there) return quad;
    cosines += 2 * at;
    sines += 2 * at;
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

// Half precision, at most its largest number. What is not a number becomes one: it would spread to
// later requests, whose positions have the weight 0 in its place.
KCCL_DEVICE uint16_t cached(float value) {
    constexpr float kMost = 65504.0f;
    const float most = value < kMost ? value : kMost;
    return Element<f16>::narrow(most > -kMost ? most : -kMost).bits;
}

// Where the cache of a KV head begins; lane: of this rank's.
template <class S>
KCCL_DEVICE uint8_t* cache_of(const Task& task, uint32_t layer, uint32_t lane, uint32_t kv_head) {
    using Dims = Shape<S>;
    const uint64_t head =
        uint64_t{layer} * Dims::kLanesHere * S::kKvHeads + lane * S::kKvHeads + kv_head;
    return reinterpret_cast<uint8_t*>(task.cache) +
           head * Dims::kCacheTiles * Dims::kCacheTileBytes;
}

// Writes a position's key and value into its tile of the cache, and notes if one is not a number:
// later positions might not show it. Each thread of the warp has its quads of the heads, or none.
template <class S>
KCCL_DEVICE void append(const Task& task, int rank, uint8_t* tile, uint32_t position,
                        const Quad& key, const Quad& value) {
    using Dims = Shape<S>;
    using Unit = Mma<f16>;
    if (warp().index() >= Dims::kHeadQuads) return;
    bool is_bad = false;
    KCCL_UNROLL
    for (int i = 0; i < 4; ++i) {
        is_bad |= key.value[i] != key.value[i] || value.value[i] != value.value[i];
    }
    if (is_bad) {
        mem::store<mem::Order::kRelaxed, mem::Scope::kDevice>(bad_request_at<S>(task, rank),
                                                              task.number);
    }
    uint8_t* const keys = tile;
    uint8_t* const values = keys + Dims::kHeadTilesOfDim * kTileBytes;
    const uint32_t at = position % kTileRows;
    KCCL_UNROLL
    for (uint32_t i = 0; i < 4; ++i) {
        const uint32_t dim = mem::forget(warp().index()) * 4 + i;
        const uint32_t part = dim / kTileColumns * kTileBytes, in_tile = dim % kTileColumns;
        mem::store_plain(reinterpret_cast<uint16_t*>(keys + part + Unit::offset(at, in_tile)),
                         cached(key.value[i]));
        mem::store_plain(reinterpret_cast<uint16_t*>(values + part + Unit::offset(in_tile, at)),
                         cached(value.value[i]));
    }
}

// What a position adds to its own attention, as it will be in the cache: own[i] becomes its part
// for query head i. Each thread of the warp has its quads of the heads, or none.
template <class S>
KCCL_DEVICE void attend_itself(const Quad (&queries)[Shape<S>::kHeadsPerKv], const Quad& own_key,
                               const Quad& own_value, Part (&own)[Shape<S>::kHeadsPerKv]) {
    const bool is_there = warp().index() < Shape<S>::kHeadQuads;
    Quad key, value;
    KCCL_UNROLL
    for (uint32_t i = 0; i < 4; ++i) {
        key.value[i] = Element<f16>::widen(f16{cached(own_key.value[i])});
        value.value[i] = Element<f16>::widen(f16{cached(own_value.value[i])});
    }
    KCCL_UNROLL
    for (uint32_t head = 0; head < Shape<S>::kHeadsPerKv; ++head) {
        float score = 0;
        KCCL_UNROLL
        for (int i = 0; i < 4; ++i) score += queries[head].value[i] * key.value[i];
        score = sum_of_warp(is_there ? score : 0.0f);
        const float maximum = rounded(score);
        const float weight = exponential2(score - maximum);
        own[head] = {value, maximum, weight};
        for (float& each : own[head].sum.value) each *= weight;
    }
}

// Stores the parts of a KV head's query heads, one behind the other.
template <class S>
KCCL_DEVICE void store_parts(Quad* parts, const Part (&own)[Shape<S>::kHeadsPerKv]) {
    using Dims = Shape<S>;
    const uint32_t thread = mem::forget(warp().index());
    KCCL_UNROLL
    for (uint32_t head = 0; head < Dims::kHeadsPerKv; ++head) {
        Quad* const part = parts + head * Dims::kPartQuads;
        if (thread < Dims::kHeadQuads) mem::store_plain(part + thread, own[head].sum);
        if (thread != 0) continue;
        mem::store_plain(part + Dims::kHeadQuads,
                         Quad{{own[head].maximum, own[head].weight, 0, 0}});
    }
}

// One unit's attention for one position.
template <class S>
class Attention {
  public:
    using Dims = Shape<S>;
    using OwnStrand = Strand<S, Dims::kHeadsPerKv>;

    KCCL_DEVICE Attention(Worker<S>& worker, uint32_t layer, uint32_t window, uint32_t unit,
                          uint32_t position)
        : worker_(worker),
          layer_(layer),
          position_(position),
          first_position_((S::kAblated & kKcclDecodeNoAttention) != 0 ? position
                          : window != 0 && position >= window         ? position - window + 1
                                                                      : 0),
          lane_(unit / S::kSplits / S::kKvHeads),
          kv_head_(unit / S::kSplits % S::kKvHeads),
          split_(unit % S::kSplits),
          lanes_(kTileQuads),
          area_(
              *reinterpret_cast<StrandArea<Dims::kHeadsPerKv>*>(worker.area(worker.warp_index()))) {
        cache_ = cache_of<S>(worker.task(), layer, (worker.group() * Dims::kGroupLanes + lane_),
                             kv_head_);
    }

    // Goes through this warp's strands, and stores their parts. All threads of the warp.
    KCCL_DEVICE void run() {
        const uint32_t own_strand = strand_of_itself();
        const bool has_itself = own_strand < Dims::kSplitStrands;
        // Not the warp that has that strand, so that none has both to do.
        const uint32_t own_warp =
            Dims::kSplitStrands < S::kWarps ? S::kWarps - 1 : (own_strand + 1) % S::kWarps;
        const bool is_own_warp = has_itself && worker_.warp_index() == own_warp;
        if (worker_.warp_index() >= Dims::kSplitStrands && !is_own_warp) return;
        // The first tile is on its way while the queries are.
        if (worker_.warp_index() < Dims::kSplitStrands)
            ask_for_tile(first_tile(worker_.warp_index()));
        stage_queries();
        worker_.stamp(kKcclDecodeArrived);
        if (is_own_warp) store_own_part();
#pragma unroll 1
        for (uint32_t i = worker_.warp_index(); i < Dims::kSplitStrands; i += S::kWarps) {
            // The strand's last tile has room for the position, and leaves it out. It is read
            // first: what is written to is not in the cache any more.
            run_strand(i);
            if (i != own_strand) continue;
            warp().sync();
            append<S>(worker_.task(), worker_.comm().rank, tile_at(position_ / kTileRows),
                      position_, own_key_, own_value_);
        }
    }

    // Merges the strands and publishes the split's part. All warps, when they have met.
    KCCL_DEVICE void publish() {
        constexpr uint32_t kQuads = Dims::kHeadsPerKv * Dims::kPartQuads;
        const uint32_t own_strand = strand_of_itself();
        KCCL_UNROLL
        for (uint32_t k = 0; k < ceil_div(kQuads, Dims::kConsumers); ++k) {
            const uint32_t quad = own_quad(worker_, k);
            if (quad >= kQuads) break;
            const uint32_t head = quad / Dims::kPartQuads, at = quad % Dims::kPartQuads;
            Part parts[Dims::kSplitStrands];
            KCCL_UNROLL
            for (uint32_t i = 0; i < Dims::kSplitStrands; ++i) {
                Part part = part_of(worker_.shared().parts[i][head], at);
                if (i == own_strand) part = merge(part, part_of(worker_.shared().own[head], at));
                parts[i] = {untagged(part.sum), untagged(part.maximum), untagged(part.weight)};
            }
            const Part whole = merge_all<Dims::kSplitStrands>(parts);
            const uint32_t place = Places<S>::part(layer_, worker_.first_lane() + lane_,
                                                   kv_head_ * Dims::kHeadsPerKv + head) +
                                   split_ * Dims::kPartQuads + at;
            const bool is_rest = at == Dims::kHeadQuads;
            worker_.publish(place, is_rest ? Quad{{whole.maximum, whole.weight, 0, 0}} : whole.sum);
        }
    }

    // Merges all splits' parts of this one's share of the KV head's elements, and publishes the
    // result. All warps, when the block has published all of its parts: two blocks may each have a
    // unit that the other waits for.
    KCCL_DEVICE void publish_share() {
        constexpr uint32_t kQuads = Dims::kHeadsPerKv * Dims::kHeadQuads;
        constexpr uint32_t kThreads = ceil_div(kQuads, S::kSplits) * S::kSplits;
        const Cut share = cut(kQuads, split_, S::kSplits);
        const uint32_t lane = worker_.first_lane() + lane_;
        KCCL_UNROLL
        for (uint32_t first = 0; first < kThreads; first += Dims::kConsumers) {
            // A thread for each quad and split.
            const uint32_t of_warp = first + worker_.warp_index() * platform::kWarpSize;
            if (of_warp >= share.num * S::kSplits) break;
            const uint32_t thread = of_warp + worker_.thread(), split = thread % S::kSplits;
            const bool is_there = thread / S::kSplits < share.num;
            const uint32_t quad = share.first + (is_there ? thread / S::kSplits : 0);
            const uint32_t head = kv_head_ * Dims::kHeadsPerKv + quad / Dims::kHeadQuads;
            const uint32_t part = Places<S>::part(layer_, lane, head) + split * Dims::kPartQuads;
            const uint32_t places[] = {part + quad % Dims::kHeadQuads, part + Dims::kHeadQuads};
            Quad quads[2];
            worker_.template await<mem::Scope::kDevice>(places, is_there ? 3u : 0,
                                                        tag_of(worker_.round()), quads);
            const Part mine = {quads[0], quads[1].value[0], quads[1].value[1]};
            const Part whole = merge_shared<S::kSplits>(mine, worker_.thread());
            if (!is_there || split != 0) continue;
            worker_.publish(Places<S>::attended(layer_, lane) + kv_head_ * kQuads + quad,
                            attended_by(whole));
        }
    }

  private:
    // A quad of a stored part.
    KCCL_DEVICE static Part part_of(const Quad* part, uint32_t at) {
        const Quad rest = mem::load_plain(part + Dims::kHeadQuads);
        return {mem::load_plain(part + at), rest.value[0], rest.value[1]};
    }

    // The strand of this split that the position itself belongs to; kSplitStrands: of another one.
    KCCL_DEVICE uint32_t strand_of_itself() const {
        const uint32_t strand = position_ / kTileRows % S::kStrands;
        return strand % S::kSplits == split_ ? strand / S::kSplits : Dims::kSplitStrands;
    }

    KCCL_DEVICE uint8_t* tile_at(uint32_t index) const {
        return cache_ + uint64_t{index} * Dims::kCacheTileBytes;
    }

    // The first tile that the query sees, of strand i of this split.
    KCCL_DEVICE uint32_t first_tile(uint32_t i) const {
        const uint32_t first = first_position_ / kTileRows;
        const uint32_t strand = i * S::kSplits + split_;
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
    // Asks for tile `at`, if there is one: its keys are loaded if there are registers for them.
    KCCL_DEVICE void ask_for_tile(uint32_t at) {
        if (CacheTile<S>::kLoadsAhead && at < end_of_tiles()) {
            tile_.load_keys(lanes_.of(0), tile_at(at));
        }
        prefetch(at);
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
        const float* const cosines = worker_.shared().cosines;
        const float* const sines = worker_.shared().sines;
        KCCL_UNROLL
        for (uint32_t head = 0; head < Dims::kHeadsPerKv; ++head) {
            Quad& quad = own_queries_[head];
            quad = turned<S>(worker_.task(), heads[head], layer_, false, cosines, sines);
            for (float& value : quad.value) value *= S::kAttentionScale * kLog2E;
            if (is_there) {
                worker_.staged()[head * Dims::kHeadQuads + worker_.thread()] = split<f16>(quad);
            }
        }
        own_key_ = turned<S>(worker_.task(), heads[kNum - 2], layer_, true, cosines, sines);
        own_value_ = heads[kNum - 1];
        warp().sync();
        OwnStrand::load(queries_, worker_.staged());
    }

    KCCL_DEVICE void store_own_part() {
        Part own[Dims::kHeadsPerKv];
        attend_itself<S>(own_queries_, own_key_, own_value_, own);
        store_parts<S>(worker_.shared().own[0], own);
    }

    // The first tile has been asked for; in the end that of the warp's next strand has.
    KCCL_DEVICE void run_strand(uint32_t index) {
        OwnStrand strand(area_, lanes_);
#pragma unroll 1
        for (uint32_t at = first_tile(index); at < end_of_tiles(); at += S::kStrands) {
            prefetch(at + S::kStrands);
            if (!CacheTile<S>::kLoadsAhead) tile_.load_keys(lanes_.of(0), tile_at(at));
            tile_.load_values(lanes_.of(0), tile_at(at));
            strand.add(tile_, queries_, [&](uint32_t, uint32_t in_tile) {
                const uint32_t position = at * kTileRows + in_tile;
                return position >= first_position_ && position < position_;
            });
            if (CacheTile<S>::kLoadsAhead && at + S::kStrands < end_of_tiles()) {
                tile_.load_keys(lanes_.of(0), tile_at(at + S::kStrands));
            }
        }
        if (index + S::kWarps < Dims::kSplitStrands) ask_for_tile(first_tile(index + S::kWarps));
        strand.store(worker_.shared().parts[index]);
    }

    Worker<S>& worker_;
    const uint32_t layer_;
    const uint32_t position_;
    const uint32_t first_position_;  // that the query sees
    const uint32_t lane_;            // of the group
    const uint32_t kv_head_;         // of the lane
    const uint32_t split_;
    const Lanes<Dims::kHeadsPerKv> lanes_;  // for weights of positions
    StrandArea<Dims::kHeadsPerKv>& area_;
    uint8_t* cache_;
    CacheTile<S> tile_;
    typename OwnStrand::Queries queries_;
    // This thread's quads.
    Quad own_queries_[Dims::kHeadsPerKv];
    Quad own_key_;
    Quad own_value_;
};

// Called by all warps that multiply. False: a wait failed.
template <class S>
KCCL_DEVICE bool attend(Worker<S>& worker, uint32_t layer, uint32_t window, uint32_t position) {
    using Dims = Shape<S>;
    static_assert(sizeof(StrandArea<Dims::kHeadsPerKv>) <= Dims::kMostSums * sizeof(Quad), "fits");
    for (uint32_t unit = worker.member(); unit < Dims::kUnits; unit += Dims::kGroupBlocks) {
        worker.next_op();
        Attention<S> attention(worker, layer, window, unit, position);
        attention.run();
        worker.stamp(kKcclDecodeMultiplied);
        if (!worker.meet()) return false;
        worker.stamp(kKcclDecodeMet);
        attention.publish();
        // The next unit's parts come to the same place.
        if (Dims::kUnits > Dims::kGroupBlocks && !worker.meet()) return false;
    }
    if constexpr (S::kMergesFirst) {
        for (uint32_t unit = worker.member(); unit < Dims::kUnits; unit += Dims::kGroupBlocks) {
            Attention<S>(worker, layer, window, unit, position).publish_share();
        }
    }
    worker.end_op();
    return true;
}

}  // namespace kccl::decode
