// Computes attention of the positions of a token step that has several columns. It gives each of
// them the bits that attend.cuh would.
//
// The warp that has a KV strand first writes the keys and values of the token step's positions that
// belong to the strand into the cache, and then reads the strand's tiles. So a position finds the
// positions before it in the cache, those of other columns included, and multiplies a tile's 16
// positions in one order. It does not see the positions behind it: they get the weight 0. No other
// warp reads or writes these tiles, so all this needs no more than a sync of the warp.
//
// As in attend.cuh, a position's attention to itself is a partial result of its own, which another
// warp computes. The queries of some columns (Columns::kTogether) are multiplied with a tile while
// it is in registers; the others' come after them, and find the tile in the cache of the
// multiprocessor.
#pragma once

#include "attend.cuh"

namespace kccl::decode {

template <class S>
class ColumnsAttention {
  public:
    using Dims = Shape<S>;
    static constexpr uint32_t kHeads = Dims::kHeadsPerKv, kTogether = Columns<S>::kTogether;
    // The queries that share a tile in registers.
    static constexpr uint32_t kQueries = kTogether * kHeads;
    using OwnKvStrand = KvStrand<S, kQueries>;
    // The number of columns whose keys and values a warp awaits at the same time.
    static constexpr uint32_t kAppended = least_of(S::kColumns, 4u);
    static_assert(sizeof(KvStrandArea<kQueries>) <= S::kColumns * Dims::kMostSums * sizeof(Float4),
                  "fits");

    KCCL_DECODE ColumnsAttention(ConsumerWarp<S>& consumer, uint32_t layer, uint32_t window,
                                 const WorkItem<S>& work_item, uint32_t position)
        : consumer_(consumer),
          layer_(layer),
          position_(position),
          window_(window),
          work_item_(work_item),
          lanes_(kTileFloat4s),
          area_(*reinterpret_cast<KvStrandArea<kQueries>*>(consumer.area(consumer.warp_index()))),
          cache_(cache_of<S>(consumer.task(), layer,
                             consumer.lane_group() * Dims::kLanesPerGroup + work_item.lane,
                             work_item.kv_head)) {}

    // Goes through this warp's KV strands, and stores the partial results of all columns' queries
    // in shared memory; appends keys and values to the cache. Called by all threads of the warp.
    KCCL_DECODE void run() {
        const uint32_t warp_index = consumer_.warp_index();
        if (warp_index < Dims::kKvStrandsPerSplit) {
            prefetch(first_tile(warp_index));
#pragma unroll 1
            for (uint32_t first = 0; first < consumer_.num_columns(); first += kAppended) {
                append_columns(first);
            }
            // The warp meets in stage_queries(), so all of its threads then find these keys and
            // values.
#pragma unroll 1
            for (uint32_t first = 0; first < consumer_.num_columns(); first += kTogether) {
                stage_queries(first);
                if (first == 0) consumer_.stamp(kKcclDecodeArrived);
#pragma unroll 1
                for (uint32_t i = warp_index; i < Dims::kKvStrandsPerSplit; i += S::kWarps) {
                    run_kv_strand(i, first);
                }
            }
        }
        bool is_first = warp_index >= Dims::kKvStrandsPerSplit;
#pragma unroll 1
        for (uint32_t column = 0; column < consumer_.num_columns(); ++column) {
            if (warp_of_itself(column) != warp_index) continue;
            store_own_partial(column, is_first);
            is_first = false;
        }
    }

  private:
    KCCL_DECODE uint32_t own_kv_strand(uint32_t column) const {
        return own_kv_strand_of<S>(work_item_.kv_split, position_ + column);
    }

    // Returns which warp computes a column's attention to itself: one without a KV strand, if there
    // are such warps. Returns S::kWarps if another KV split has the position.
    KCCL_DECODE uint32_t warp_of_itself(uint32_t column) const {
        constexpr uint32_t kStrands = Dims::kKvStrandsPerSplit;
        const uint32_t kv_strand = own_kv_strand(column);
        if (kv_strand >= kStrands) return S::kWarps;
        if constexpr (kStrands < S::kWarps) {
            return kStrands + column % (S::kWarps - kStrands);
        } else {
            return (kv_strand + 1 + column) % S::kWarps;
        }
    }

    KCCL_DECODE uint8_t* tile_at(uint32_t index) const {
        return cache_ + uint64_t{index} * Dims::kCacheTileBytes;
    }

    // Returns the first position that a column sees.
    KCCL_DECODE uint32_t first_seen(uint32_t column) const {
        const uint32_t position = position_ + column;
        return window_ != 0 && position >= window_ ? position - window_ + 1 : 0;
    }
    // first_tile() returns the number of the first tile of KV strand i of this KV split that a
    // column sees. end_of_tiles() returns the number behind the last tile that one sees.
    KCCL_DECODE uint32_t first_tile(uint32_t i) const {
        const uint32_t first = first_seen(0) / kTileRows;
        const uint32_t kv_strand = i * S::kKvSplits + work_item_.kv_split;
        return first + (kv_strand + S::kKvStrands - first % S::kKvStrands) % S::kKvStrands;
    }
    KCCL_DECODE uint32_t end_of_tiles() const {
        return ceil_div(position_ + consumer_.num_columns() - 1, kTileRows);
    }

    // Prefetches the keys and values of tile `at`, if a column sees it.
    KCCL_DECODE void prefetch(uint32_t at) const {
        if (at >= end_of_tiles()) return;
        for (uint32_t line = consumer_.thread(); line < Dims::kCacheTileBytes / kKcclLineBytes;
             line += platform::kWarpSize) {
            mem::prefetch(tile_at(at) + line * kKcclLineBytes);
        }
    }

    KCCL_DECODE bool has_float4() const { return consumer_.thread() < Dims::kHeadFloat4s; }
    // Returns the slot of this thread's float4 of a head of a column.
    KCCL_DECODE uint32_t slot_of(uint32_t head, uint32_t column) const {
        const uint32_t slot = Slots<S>::qkv(layer_, consumer_.first_lane() + work_item_.lane) +
                              head * Dims::kHeadFloat4s + (has_float4() ? consumer_.thread() : 0);
        return Slots<S>::in_column(slot, column);
    }
    KCCL_DECODE uint32_t query_head(uint32_t i) const { return work_item_.kv_head * kHeads + i; }
    KCCL_DECODE uint32_t key_head() const { return S::kHeads + work_item_.kv_head; }
    KCCL_DECODE uint32_t value_head() const { return key_head() + S::kKvHeads; }

    // Applies norm and RoPE to a head of a column; is_key: it is the key, not a query.
    KCCL_DECODE Float4 turned_at(const Float4& head, uint32_t column, bool is_key) {
        const uint32_t at = column * (S::kHeadDim / 2);
        Float4 four = turned<S>(consumer_.task(), head, layer_, is_key,
                                consumer_.shared().cosines + at, consumer_.shared().sines + at);
        if (!is_key) {
            for (float& value : four.value) value *= S::kAttentionScale * kLog2E;
        }
        return four;
    }

    // Writes the keys and values of kAppended columns from `first` on into the cache, as far as
    // they belong to this warp's KV strands. Waits for all of them at the same time: most often one
    // warp has all, because neighbouring positions share a tile.
    KCCL_DECODE void append_columns(uint32_t first) {
        uint32_t slots[2 * kAppended], mine = 0, wanted = 0;
        KCCL_UNROLL
        for (uint32_t i = 0; i < kAppended; ++i) {
            const uint32_t column = first + i, kv_strand = own_kv_strand(column);
            const bool is_mine = column < consumer_.num_columns() &&
                                 kv_strand < Dims::kKvStrandsPerSplit &&
                                 kv_strand % S::kWarps == consumer_.warp_index();
            mine |= is_mine ? 1u << i : 0;
            wanted |= is_mine && has_float4() ? 3u << 2 * i : 0;
            slots[2 * i] = slot_of(key_head(), column);
            slots[2 * i + 1] = slot_of(value_head(), column);
        }
        if (mine == 0) return;
        Float4 heads[2 * kAppended];
        consumer_.template await<mem::Scope::kDevice>(
            slots, wanted, consumer_.template tags<2>(first), heads, 0, (mine & 1u) != 0);
#pragma unroll 1
        for (uint32_t column = first; mine != 0; ++column, mine >>= 1) {
            if ((mine & 1u) != 0) append_column(column, heads[0], heads[1]);
            // The loop is not unrolled, so its code is short, and heads stay in registers.
            KCCL_UNROLL
            for (uint32_t i = 2; i < 2 * kAppended; ++i) heads[i - 2] = heads[i];
        }
    }

    // Writes a column's key and value into the cache.
    KCCL_DECODE void append_column(uint32_t column, const Float4& key, const Float4& value) {
        const uint32_t position = position_ + column;
        append<S>(consumer_.task(), consumer_.comm().rank, tile_at(position / kTileRows), position,
                  turned_at(key, column, true), value,
                  column != 0 && position >= consumer_.task().num_ids);
    }

    // Waits for the queries of kTogether columns from `first` on, and stages them. Those of columns
    // that the token step does not use become zeros.
    KCCL_DECODE void stage_queries(uint32_t first) {
        uint32_t slots[kQueries];
        Float4 queries[kQueries];
        KCCL_UNROLL
        for (uint32_t i = 0; i < kQueries; ++i) {
            slots[i] = slot_of(query_head(i % kHeads), first + i / kHeads);
        }
        consumer_.template await<mem::Scope::kDevice>(
            slots,
            consumer_.template wanted_of<kHeads, kTogether>(has_float4() ? (1u << kHeads) - 1 : 0,
                                                            first),
            consumer_.template tags<kHeads>(first), queries, 0, first == 0);
        // The queries before have been read, because the warp has met in their last KV strand.
        KCCL_UNROLL
        for (uint32_t i = 0; i < kQueries; ++i) {
            const uint32_t column = first + i / kHeads;
            const Float4 four =
                turned_at(queries[i], column < S::kColumns ? column : S::kColumns - 1, false);
            if (has_float4()) {
                consumer_.staged()[i * Dims::kHeadFloat4s + consumer_.thread()] = split<f16>(four);
            }
        }
        warp().sync();
        OwnKvStrand::load(queries_, consumer_.staged());
        warp().sync();
    }

    // Computes a column's attention to itself, and stores the partial results. may_scout: see
    // Waiter::await().
    KCCL_DECODE void store_own_partial(uint32_t column, bool may_scout) {
        constexpr int kNum = kHeads + 2;
        uint32_t slots[kNum];
        Float4 heads[kNum];
        KCCL_UNROLL
        for (uint32_t i = 0; i < kHeads; ++i) slots[i] = slot_of(query_head(i), column);
        slots[kHeads] = slot_of(key_head(), column);
        slots[kHeads + 1] = slot_of(value_head(), column);
        consumer_.template await<mem::Scope::kDevice>(slots, has_float4() ? ~0u : 0,
                                                      consumer_.tag(column), heads, 0, may_scout);
        Float4 queries[kHeads];
        KCCL_UNROLL
        for (uint32_t i = 0; i < kHeads; ++i) queries[i] = turned_at(heads[i], column, false);
        Partial own[kHeads];
        attend_itself<S>(queries, turned_at(heads[kHeads], column, true), heads[kHeads + 1], own);
        store_partials<S>(own_partial(consumer_.shared(), column * kHeads), own);
    }

    // Goes through KV strand `index` of this KV split for kTogether columns from `first` on, and
    // stores their partial results in shared memory.
    KCCL_DECODE void run_kv_strand(uint32_t index, uint32_t first) {
        OwnKvStrand kv_strand(area_, lanes_);
#pragma unroll 1
        for (uint32_t at = first_tile(index); at < end_of_tiles(); at += S::kKvStrands) {
            prefetch(at + S::kKvStrands);
            tile_.load_keys(lanes_.of(0), tile_at(at));
            tile_.load_values(lanes_.of(0), tile_at(at));
            kv_strand.add(tile_, queries_, [&](uint32_t query, uint32_t in_tile) {
                const uint32_t column = first + query / kHeads;
                const uint32_t position = at * kTileRows + in_tile;
                return position >= first_seen(column) && position < position_ + column;
            });
        }
        if (index + S::kWarps < Dims::kKvStrandsPerSplit) prefetch(first_tile(index + S::kWarps));
        kv_strand.store(reinterpret_cast<Float4(*)[Dims::kPartialFloat4s]>(
            consumer_.partial(index, first * kHeads)));
    }

    ConsumerWarp<S>& consumer_;
    const uint32_t layer_;
    const uint32_t position_;  // of column 0
    const uint32_t window_;
    const WorkItem<S> work_item_;
    const Lanes<kQueries> lanes_;  // this thread's part of a tile's weights
    KvStrandArea<kQueries>& area_;
    uint8_t* const cache_;
    CacheTile<S> tile_;
    typename OwnKvStrand::Queries queries_;
};

// Computes attention for the block's work items, and publishes the results. Called by all consumer
// warps. Returns false if a wait failed.
template <class S>
KCCL_DECODE bool attend_columns(ConsumerWarp<S>& consumer, uint32_t layer, uint32_t window,
                                uint32_t position) {
    const auto run = [&](const WorkItem<S>& work_item) {
        ColumnsAttention<S>(consumer, layer, window, work_item, position).run();
    };
    return for_work_items(consumer, layer, position, run);
}

}  // namespace kccl::decode
