// Computes attention of the requests of a token step with seats (seats.cuh). It gives each of them
// the bits that attend.cuh would.
//
// Each request has keys and values of its own. So warps share the columns: with as many columns as
// warps, each warp has all KV strands of one request. It waits for the request's queries once, and
// all requests' waits run at the same time. With fewer columns, several warps share the KV strands
// of a column.
#pragma once

#include "attend.cuh"

namespace kccl::decode {

template <class S>
class SeatsAttention {
  public:
    using Dims = Shape<S>;
    static constexpr uint32_t kHeads = Dims::kHeadsPerKv;
    using OwnKvStrand = KvStrand<S, kHeads>;
    static_assert(sizeof(KvStrandArea<kHeads>) <= S::kColumns * Dims::kMostSums * sizeof(Float4),
                  "fits");

    KCCL_DECODE SeatsAttention(ConsumerWarp<S>& consumer, uint32_t layer, uint32_t window,
                               const WorkItem<S>& work_item, uint32_t turn)
        : consumer_(consumer),
          layer_(layer),
          window_(window),
          turn_(turn),
          work_item_(work_item),
          lanes_(kTileFloat4s),
          area_(*reinterpret_cast<KvStrandArea<kHeads>*>(consumer.area(consumer.warp_index()))) {}

    // Goes through this warp's KV strands, and stores their partial results in shared memory, as
    // Attention::run() does. Called by all threads of the warp.
    KCCL_DECODE void run() {
        const uint32_t warp_index = consumer_.warp_index(), num = consumer_.num_columns();
        sharers_ = num < S::kWarps ? S::kWarps / num : 1;
        sharer_ = warp_index / num;
        if (sharer_ >= sharers_) return;
#pragma unroll 1
        for (uint32_t column = warp_index % num; column < num; column += S::kWarps) {
            run_column(column);
        }
    }

  private:
    KCCL_DECODE void run_column(uint32_t column) {
        const Task& seat = task_of<S>(consumer_.task(), column);
        position_ = position_of<S>(consumer_.task(), turn_, column);
        first_position_ = window_ != 0 && position_ >= window_ ? position_ - window_ + 1 : 0;
        cache_ = cache_of<S>(seat, layer_,
                             consumer_.lane_group() * Dims::kLanesPerGroup + work_item_.lane,
                             work_item_.kv_head);
        const uint32_t own = own_kv_strand_of<S>(work_item_.kv_split, position_);
        const bool has_itself = own < Dims::kKvStrandsPerSplit;
        const bool appends = has_itself && own % sharers_ == sharer_;
        // Another warp than the one that appends, if several share the column.
        const bool attends_itself = has_itself && (own + 1) % sharers_ == sharer_;
        if (sharer_ >= Dims::kKvStrandsPerSplit && !attends_itself) return;
        for (uint32_t i = sharer_; i < Dims::kKvStrandsPerSplit; i += sharers_) {
            prefetch(first_tile(i));
        }
        stage_queries(column, appends || attends_itself);
        consumer_.stamp(kKcclDecodeArrived);
        if (attends_itself) store_own_partial(column);
#pragma unroll 1
        for (uint32_t i = sharer_; i < Dims::kKvStrandsPerSplit; i += sharers_) {
            run_kv_strand(i, column);
        }
        if (!appends) return;
        // All threads have read the tile before it is written. A bad key or value of a seat shows
        // in its own logits.
        warp().sync();
        append<S>(consumer_.task(), consumer_.comm().rank, tile_at(position_ / kTileRows),
                  position_, own_key_, own_value_, true);
    }

    KCCL_DECODE uint8_t* tile_at(uint32_t index) const {
        return cache_ + uint64_t{index} * Dims::kCacheTileBytes;
    }
    // Returns the number of the first tile that the query sees of KV strand i of this KV split.
    KCCL_DECODE uint32_t first_tile(uint32_t i) const {
        const uint32_t first = first_position_ / kTileRows;
        const uint32_t kv_strand = i * S::kKvSplits + work_item_.kv_split;
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

    // Waits for a column's queries, and for its key and value if the warp needs them. Applies norm
    // and RoPE, and stages the queries.
    KCCL_DECODE void stage_queries(uint32_t column, bool has_itself) {
        constexpr int kNum = kHeads + 2;
        uint32_t slots[kNum];
        Float4 heads[kNum];
        const bool is_there = consumer_.thread() < Dims::kHeadFloat4s;
        KCCL_UNROLL
        for (int i = 0; i < kNum; ++i) {
            const uint32_t head = i < kNum - 2    ? work_item_.kv_head * kHeads + i
                                  : i == kNum - 2 ? S::kHeads + work_item_.kv_head
                                                  : S::kHeads + S::kKvHeads + work_item_.kv_head;
            slots[i] = Slots<S>::in_column(
                Slots<S>::qkv(layer_, consumer_.first_lane() + work_item_.lane) +
                    head * Dims::kHeadFloat4s + (is_there ? consumer_.thread() : 0),
                column);
        }
        const uint32_t all = has_itself ? (1u << kNum) - 1 : (1u << kHeads) - 1;
        consumer_.template await<mem::Scope::kDevice>(slots, is_there ? all : 0,
                                                      consumer_.tag(column), heads);
        const uint32_t at = column * (S::kHeadDim / 2);
        const float* const cosines = consumer_.shared().cosines + at;
        const float* const sines = consumer_.shared().sines + at;
        KCCL_UNROLL
        for (uint32_t head = 0; head < kHeads; ++head) {
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
        // The warp's next column may be staged when all threads have read these queries.
        warp().sync();
    }

    KCCL_DECODE void store_own_partial(uint32_t column) {
        Partial own[kHeads];
        attend_itself<S>(own_queries_, own_key_, own_value_, own);
        store_partials<S>(own_partial(consumer_.shared(), column * kHeads), own);
    }

    // Goes through KV strand `index` of this KV split, and stores its partial results.
    KCCL_DECODE void run_kv_strand(uint32_t index, uint32_t column) {
        OwnKvStrand kv_strand(area_, lanes_);
#pragma unroll 1
        for (uint32_t at = first_tile(index); at < end_of_tiles(); at += S::kKvStrands) {
            prefetch(at + S::kKvStrands);
            tile_.load_keys(lanes_.of(0), tile_at(at));
            tile_.load_values(lanes_.of(0), tile_at(at));
            kv_strand.add(tile_, queries_, [&](uint32_t, uint32_t in_tile) {
                const uint32_t position = at * kTileRows + in_tile;
                return position >= first_position_ && position < position_;
            });
        }
        kv_strand.store(reinterpret_cast<Float4(*)[Dims::kPartialFloat4s]>(
            consumer_.partial(index, column * kHeads)));
    }

    ConsumerWarp<S>& consumer_;
    const uint32_t layer_;
    const uint32_t window_;
    const uint32_t turn_;  // the number of the token step in the round
    const WorkItem<S> work_item_;
    const Lanes<kHeads> lanes_;  // this thread's part of a tile's weights
    KvStrandArea<kHeads>& area_;
    // How many warps share the KV strands of a column, and which of them this one is.
    uint32_t sharers_ = 1;
    uint32_t sharer_ = 0;
    // The column's position, the first position that it sees, and its cache.
    uint32_t position_ = 0;
    uint32_t first_position_ = 0;
    uint8_t* cache_ = nullptr;
    CacheTile<S> tile_;
    typename OwnKvStrand::Queries queries_;
    // This thread's float4s of the query heads, the key and the value.
    Float4 own_queries_[kHeads];
    Float4 own_key_;
    Float4 own_value_;
};

// Computes attention for the block's work items, and publishes the results. turn: the number of the
// token step in the round. Called by all consumer warps. Returns false if a wait failed.
template <class S>
KCCL_DECODE bool attend_seats(ConsumerWarp<S>& consumer, uint32_t layer, uint32_t window,
                              uint32_t turn) {
    const auto run = [&](const WorkItem<S>& work_item) {
        SeatsAttention<S>(consumer, layer, window, work_item, turn).run();
    };
    return for_work_items(consumer, layer, turn, run);
}

}  // namespace kccl::decode
