// Computes attention of one position over itself and all positions before it; attend_columns.cuh
// does it where a token step has several columns. Work items, and what becomes of their partial
// results: attend_merge.cuh. A KV split has some of the positions, and each of its KV strands some
// of those (shape.cuh). A warp goes through a KV strand tile by tile, 16 positions at a time
// (kv_strand.cuh).
//
// The cache holds half-precision numbers. A tile of it is read and written by one warp only, so
// accesses need no synchronisation. The position's own key and value are not read back from the
// cache. Another warp computes a partial result for them from registers, so no warp waits for data
// that was just written. That partial result is then merged with the one of the position's KV
// strand.
#pragma once

#include "attend_merge.cuh"
#include "kv_cache.cuh"
#include "kv_strand.cuh"

namespace kccl::decode {

// Applies norm, if the model has one, and RoPE to a query or key head, and returns the result. Each
// thread passes one float4 of the head, and gets that float4 of the result. A thread beyond the
// head passes and gets zeros. cosines, sines: the rows of RoPE's tables for the position. Called by
// all threads of the warp.
template <class S>
KCCL_DECODE Float4 turned(const Task& task, Float4 four, uint32_t layer, bool is_key,
                          const float* cosines, const float* sines) {
    const uint32_t at = mem::forget(warp().index());
    const bool is_there = at < Shape<S>::kHeadFloat4s;
    if constexpr (S::kHasQkNorm) {
        float squares = 0;
        for (const float value : four.value) squares += value * value;
        squares = sum_of_warp(squares);
        const float inverse = reciprocal_root(squares * (1.0f / S::kHeadDim) + S::kNormEps);
        const uint64_t row = 2 * layer + (is_key ? 1 : 0);
        const Float4 norm =
            load_float4(task.qk_norms, row * Shape<S>::kHeadFloat4s + (is_there ? at : 0));
        KCCL_UNROLL
        for (int i = 0; i < 4; ++i) four.value[i] = four.value[i] * inverse * norm.value[i];
    }
    if (!is_there) return four;
    cosines += 2 * at;
    sines += 2 * at;
    Float4 result;
    KCCL_UNROLL
    for (int i = 0; i < 2; ++i) {
        const float cosine = mem::load_plain(cosines + i), sine = mem::load_plain(sines + i);
        const float a = four.value[2 * i], b = four.value[2 * i + 1];
        result.value[2 * i] = a * cosine - b * sine;
        result.value[2 * i + 1] = a * sine + b * cosine;
    }
    return result;
}

// Computes a position's attention to itself, with key and value rounded as the cache will hold
// them. own[i] becomes the partial result for query head i. Called by all threads of the warp. Each
// thread passes one float4 of each head. Threads beyond the head's last float4 get partial results
// that mean nothing.
template <class S>
KCCL_DECODE void attend_itself(const Float4 (&queries)[Shape<S>::kHeadsPerKv],
                               const Float4& own_key, const Float4& own_value,
                               Partial (&own)[Shape<S>::kHeadsPerKv]) {
    const bool is_there = warp().index() < Shape<S>::kHeadFloat4s;
    Float4 key, value;
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

// Stores the partial results of a KV head's query heads at `partials`, one after another. Called by
// all threads of the warp, each of which passes its float4 of each head.
template <class S>
KCCL_DECODE void store_partials(Float4* partials, const Partial (&own)[Shape<S>::kHeadsPerKv]) {
    using Dims = Shape<S>;
    const uint32_t thread = mem::forget(warp().index());
    KCCL_UNROLL
    for (uint32_t head = 0; head < Dims::kHeadsPerKv; ++head) {
        Float4* const partial = partials + head * Dims::kPartialFloat4s;
        if (thread < Dims::kHeadFloat4s) mem::store_plain(partial + thread, own[head].sum);
        if (thread != 0) continue;
        mem::store_plain(partial + Dims::kHeadFloat4s,
                         Float4{{own[head].maximum, own[head].weight, 0, 0}});
    }
}

// Computes the attention of one work item (a KV head and a KV split) for one position.
template <class S>
class Attention {
  public:
    using Dims = Shape<S>;
    using OwnKvStrand = KvStrand<S, Dims::kHeadsPerKv>;

    KCCL_DECODE Attention(ConsumerWarp<S>& consumer, uint32_t layer, uint32_t window,
                          const WorkItem<S>& work_item, uint32_t position)
        : consumer_(consumer),
          layer_(layer),
          position_(position),
          first_position_((S::kAblated & kKcclDecodeNoAttention) != 0 ? position
                          : window != 0 && position >= window         ? position - window + 1
                                                                      : 0),
          lane_(work_item.lane),
          kv_head_(work_item.kv_head),
          kv_split_(work_item.kv_split),
          lanes_(kTileFloat4s),
          area_(*reinterpret_cast<KvStrandArea<Dims::kHeadsPerKv>*>(
              consumer.area(consumer.warp_index()))) {
        cache_ = cache_of<S>(consumer.task(), layer,
                             (consumer.lane_group() * Dims::kLanesPerGroup + lane_), kv_head_);
    }

    // Goes through this warp's KV strands, and stores their partial results in shared memory. If
    // the position belongs to this KV split, one warp also computes its attention to itself, and
    // the warp that has its KV strand appends its key and value to the cache. Called by all threads
    // of the warp.
    KCCL_DECODE void run() {
        const uint32_t own_kv_strand = own_kv_strand_of<S>(kv_split_, position_);
        const bool has_itself = own_kv_strand < Dims::kKvStrandsPerSplit;
        // The warp own_warp computes the position's attention to itself. It is not the one that
        // goes through the position's KV strand, to spread the work.
        const uint32_t own_warp =
            Dims::kKvStrandsPerSplit < S::kWarps ? S::kWarps - 1 : (own_kv_strand + 1) % S::kWarps;
        const bool is_own_warp = has_itself && consumer_.warp_index() == own_warp;
        if (consumer_.warp_index() >= Dims::kKvStrandsPerSplit && !is_own_warp) return;
        // Begins to load the warp's first tile now, so that it comes while the warp waits for its
        // queries.
        if (consumer_.warp_index() < Dims::kKvStrandsPerSplit)
            ask_for_tile(first_tile(consumer_.warp_index()));
        stage_queries();
        consumer_.stamp(kKcclDecodeArrived);
        if (is_own_warp) store_own_partial();
#pragma unroll 1
        for (uint32_t i = consumer_.warp_index(); i < Dims::kKvStrandsPerSplit; i += S::kWarps) {
            // The position's tile may be the last one of this KV strand. So the KV strand is read,
            // without the position, before the position's key and value are written to that tile.
            run_kv_strand(i);
            if (i != own_kv_strand) continue;
            warp().sync();
            append<S>(consumer_.task(), consumer_.comm().rank, tile_at(position_ / kTileRows),
                      position_, own_key_, own_value_);
        }
    }

  private:
    KCCL_DECODE uint8_t* tile_at(uint32_t index) const {
        return cache_ + uint64_t{index} * Dims::kCacheTileBytes;
    }

    // Returns the number of the first tile that the query sees of KV strand i of this KV split.
    KCCL_DECODE uint32_t first_tile(uint32_t i) const {
        const uint32_t first = first_position_ / kTileRows;
        const uint32_t kv_strand = i * S::kKvSplits + kv_split_;
        return first + (kv_strand + S::kKvStrands - first % S::kKvStrands) % S::kKvStrands;
    }
    // Returns how many tiles of the cache have positions before this one.
    KCCL_DECODE uint32_t end_of_tiles() const { return ceil_div(position_, kTileRows); }

    // Prefetches the keys and values of tile `at`, if it has positions before this one.
    KCCL_DECODE void prefetch(uint32_t at) const {
        if (at >= end_of_tiles()) return;
        for (uint32_t line = consumer_.thread(); line < Dims::kCacheTileBytes / kKcclLineBytes;
             line += platform::kWarpSize) {
            mem::prefetch(tile_at(at) + line * kKcclLineBytes);
        }
    }
    // Begins to load tile `at`, if it exists: prefetches it, and loads its keys into registers if
    // there are enough registers (CacheTile::kLoadsAhead).
    KCCL_DECODE void ask_for_tile(uint32_t at) {
        if (CacheTile<S>::kLoadsAhead && at < end_of_tiles()) {
            tile_.load_keys(lanes_.of(0), tile_at(at));
        }
        prefetch(at);
    }

    // Waits for the position's queries, key and value of this KV head, applies norm and RoPE, and
    // stages the queries (stores them in shared memory for the matrix unit). This thread's float4s
    // of all of them stay in registers.
    KCCL_DECODE void stage_queries() {
        constexpr int kNum = Dims::kHeadsPerKv + 2;
        uint32_t slots[kNum];
        Float4 heads[kNum];
        const bool is_there = consumer_.thread() < Dims::kHeadFloat4s;
        KCCL_UNROLL
        for (int i = 0; i < kNum; ++i) {
            const uint32_t head = i < kNum - 2    ? kv_head_ * Dims::kHeadsPerKv + i
                                  : i == kNum - 2 ? S::kHeads + kv_head_
                                                  : S::kHeads + S::kKvHeads + kv_head_;
            slots[i] = Slots<S>::qkv(layer_, consumer_.first_lane() + lane_) +
                       head * Dims::kHeadFloat4s + (is_there ? consumer_.thread() : 0);
        }
        consumer_.template await<mem::Scope::kDevice>(slots, is_there ? ~0u : 0,
                                                      tag_of(consumer_.token_step()), heads);
        const float* const cosines = consumer_.shared().cosines;
        const float* const sines = consumer_.shared().sines;
        KCCL_UNROLL
        for (uint32_t head = 0; head < Dims::kHeadsPerKv; ++head) {
            Float4& four = own_queries_[head];
            four = turned<S>(consumer_.task(), heads[head], layer_, false, cosines, sines);
            for (float& value : four.value) value *= S::kAttentionScale * kLog2E;
            if (is_there) {
                consumer_.staged()[head * Dims::kHeadFloat4s + consumer_.thread()] =
                    split<f16>(four);
            }
        }
        own_key_ = turned<S>(consumer_.task(), heads[kNum - 2], layer_, true, cosines, sines);
        own_value_ = heads[kNum - 1];
        warp().sync();
        OwnKvStrand::load(queries_, consumer_.staged());
    }

    KCCL_DECODE void store_own_partial() {
        Partial own[Dims::kHeadsPerKv];
        attend_itself<S>(own_queries_, own_key_, own_value_, own);
        store_partials<S>(consumer_.shared().own[0], own);
    }

    // Goes through KV strand `index` of this KV split, and stores its partial result in shared
    // memory. On entry, the loads of its first tile have begun. On return, the loads of the first
    // tile of the warp's next KV strand have begun, if it has another one.
    KCCL_DECODE void run_kv_strand(uint32_t index) {
        OwnKvStrand kv_strand(area_, lanes_);
#pragma unroll 1
        for (uint32_t at = first_tile(index); at < end_of_tiles(); at += S::kKvStrands) {
            prefetch(at + S::kKvStrands);
            if (!CacheTile<S>::kLoadsAhead) tile_.load_keys(lanes_.of(0), tile_at(at));
            tile_.load_values(lanes_.of(0), tile_at(at));
            kv_strand.add(tile_, queries_, [&](uint32_t, uint32_t in_tile) {
                const uint32_t position = at * kTileRows + in_tile;
                return position >= first_position_ && position < position_;
            });
            if (CacheTile<S>::kLoadsAhead && at + S::kKvStrands < end_of_tiles()) {
                tile_.load_keys(lanes_.of(0), tile_at(at + S::kKvStrands));
            }
        }
        if (index + S::kWarps < Dims::kKvStrandsPerSplit)
            ask_for_tile(first_tile(index + S::kWarps));
        kv_strand.store(consumer_.shared().partials[index]);
    }

    ConsumerWarp<S>& consumer_;
    const uint32_t layer_;
    const uint32_t position_;
    const uint32_t first_position_;  // the first position that the query sees
    const uint32_t lane_;            // number in the lane group
    const uint32_t kv_head_;         // number in the lane
    const uint32_t kv_split_;
    const Lanes<Dims::kHeadsPerKv> lanes_;  // this thread's part of a tile's weights
    KvStrandArea<Dims::kHeadsPerKv>& area_;
    uint8_t* cache_;
    CacheTile<S> tile_;
    typename OwnKvStrand::Queries queries_;
    // This thread's float4s of the query heads, the key and the value.
    Float4 own_queries_[Dims::kHeadsPerKv];
    Float4 own_key_;
    Float4 own_value_;
};

// Computes attention for the block's work items, and publishes the results. Called by all consumer
// warps. Returns false if a wait failed.
template <class S>
KCCL_DECODE bool attend(ConsumerWarp<S>& consumer, uint32_t layer, uint32_t window,
                        uint32_t position) {
    using Dims = Shape<S>;
    static_assert(sizeof(KvStrandArea<Dims::kHeadsPerKv>) <= Dims::kMostSums * sizeof(Float4),
                  "fits");
    const auto run = [&](const WorkItem<S>& work_item) {
        Attention<S>(consumer, layer, window, work_item, position).run();
    };
    return for_work_items(consumer, layer, position, run);
}

}  // namespace kccl::decode
