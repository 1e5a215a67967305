// Computes attention of a chunk, kChunk neighbouring positions of a prompt. First each position's
// key and value go into the cache, with norm and RoPE. When all blocks of the lane group (the
// blocks that share a residual) have done that, each position reads the positions before it from
// the cache, those of the same pass included: 16 queries of a KV head at a time
// (prefill_attend_tiles.cuh), or as here. Here a work item is a query group: the queries of a KV
// head at kTogether neighbouring positions, which share its keys and values. Partial results are
// merged as decode merges them.
#pragma once

#include "prefill_attend_tiles.cuh"

namespace kccl::decode {

// Applies norm and RoPE to the chunk's queries and keys, stages the queries, fills the cache, and
// computes each position's attention to itself. A warp takes one position of a KV head at a time.
// Called by all consumer warps.
template <class S>
KCCL_DECODE void turn_chunk(PrefillConsumer<S>& consumer, const PromptChunk& chunk,
                            uint32_t layer) {
    using Dims = Shape<S>;
    using C = ChunkLayout<S>;
    constexpr uint32_t kHeads = Dims::kHeadsPerKv;
    const uint32_t thread = mem::forget(warp().index());
    const bool is_there = thread < Dims::kHeadFloat4s;
    const uint32_t num = Dims::kLanesPerGroup * S::kKvHeads * chunk.num;
    const uint32_t blocks = consumer.squad_blocks();
    for (uint32_t i = consumer.warp_index() * blocks + consumer.block_in_squad(); i < num;
         i += S::kChunkWarps * blocks) {
        const uint32_t number = i % chunk.num, kv_head = i / chunk.num % S::kKvHeads;
        const uint32_t lane = consumer.first_lane_here() + i / chunk.num / S::kKvHeads;
        const uint32_t position = chunk.first + number;
        const auto head_of = [&](uint32_t head) {
            const uint32_t index4 = head * Dims::kHeadFloat4s + (is_there ? thread : 0);
            const uint32_t slot =
                C::kQkv + lane * (Dims::kQkvRows / kTileRows) * C::kStripe + C::at(index4, number);
            return is_there ? mem::load_plain(consumer.here(slot)) : Float4{};
        };
        const uint32_t first = C::first_head(lane, kv_head, number);
        auto* const staged = reinterpret_cast<StagedFloat4*>(
            consumer.here(C::kQueriesAt + first * Dims::kHeadFloat4s));
        const uint64_t turns = uint64_t{position} * (S::kHeadDim / 2);
        const auto* const cosines = reinterpret_cast<const float*>(consumer.task().cosines) + turns;
        const auto* const sines = reinterpret_cast<const float*>(consumer.task().sines) + turns;
        Float4 queries[kHeads];
        KCCL_UNROLL
        for (uint32_t head = 0; head < kHeads; ++head) {
            Float4& four = queries[head];
            four = turned<S>(consumer.task(), head_of(kv_head * kHeads + head), layer, false,
                             cosines, sines);
            for (float& value : four.value) value *= S::kAttentionScale * kLog2E;
            if (is_there) {
                mem::store_plain(staged + head * Dims::kHeadFloat4s + thread, split<f16>(four));
            }
        }
        const Float4 key =
            turned<S>(consumer.task(), head_of(S::kHeads + kv_head), layer, true, cosines, sines);
        const Float4 value = head_of(S::kHeads + S::kKvHeads + kv_head);
        uint8_t* const tile = cache_of<S>(consumer.task(), layer, lane, kv_head) +
                              uint64_t{position / kTileRows} * Dims::kCacheTileBytes;
        append<S>(consumer.task(), consumer.comm().rank, tile, position, key, value);
        Partial own[kHeads];
        attend_itself<S>(queries, key, value, own);
        store_partials<S>(consumer.here(C::kOwnPartials + first * Dims::kPartialFloat4s), own);
    }
}

// Computes the attention of a query group: the queries of a KV head at up to kTogether positions.
template <class S>
class ChunkAttention {
  public:
    using Dims = Shape<S>;
    using C = ChunkLayout<S>;

    KCCL_DECODE ChunkAttention(PrefillConsumer<S>& consumer, const PromptChunk& chunk,
                               uint32_t layer, uint32_t window, uint32_t work_item)
        : consumer_(consumer),
          partials_(consumer.shared().partials()),
          num_query_groups_(ceil_div(chunk.num, C::kTogether)),
          number_(work_item % num_query_groups_ * C::kTogether),
          num_(chunk.num - number_ < C::kTogether ? chunk.num - number_ : C::kTogether),
          position_(chunk.first + number_),
          layer_(layer),
          window_(window),
          kv_head_(work_item / num_query_groups_ % S::kKvHeads),
          lane_(consumer.first_lane_here() + work_item / num_query_groups_ / S::kKvHeads),
          cache_(cache_of<S>(consumer.task(), layer, lane_, kv_head_)) {}

    // Goes through this warp's KV strands, and stores their partial results in shared memory.
    KCCL_DECODE void run() {
        const Lanes<C::kQueries> lanes(kTileFloat4s);
        const auto* const staged = reinterpret_cast<const StagedFloat4*>(
            consumer_.here(C::kQueriesAt + first_head() * Dims::kHeadFloat4s));
        typename KvStrand<S, C::kQueries>::Queries queries;
        KvStrand<S, C::kQueries>::load(queries, staged);
        for (uint32_t i = consumer_.warp_index(); i < S::kKvStrands; i += S::kChunkWarps) {
            if (first_tile(i) >= end_of_tiles()) continue;
            KvStrand<S, C::kQueries> kv_strand(
                consumer_.shared().kv_strands[consumer_.warp_index()], lanes);
#pragma unroll 1
            for (uint32_t at = first_tile(i); at < end_of_tiles(); at += S::kKvStrands) {
                CacheTile<S> tile;
                tile.load_keys(lanes.of(0), cache_ + uint64_t{at} * Dims::kCacheTileBytes);
                tile.load_values(lanes.of(0), cache_ + uint64_t{at} * Dims::kCacheTileBytes);
                kv_strand.add(tile, queries, [&](uint32_t query, uint32_t in_tile) {
                    const uint32_t mine = position_ + query / Dims::kHeadsPerKv;
                    const uint32_t seen = at * kTileRows + in_tile;
                    return seen >= first_seen(mine) && seen < mine;
                });
            }
            kv_strand.store(partials_.kv_strands[i]);
        }
    }

    // Merges the partial results of the KV strands, and each position's partial result for itself,
    // into kNodes partial results for each query. Each of these merges kFold KV strands. Called by
    // all consumer warps, when they have met after run().
    KCCL_DECODE void merge_kv_strands() {
        for_each_float4(C::kNodes, [&](uint32_t node, uint32_t query, uint32_t index4) {
            const uint32_t own =
                (position_ + query / Dims::kHeadsPerKv) / kTileRows % S::kKvStrands;
            Partial partials[C::kFold];
            KCCL_UNROLL
            for (uint32_t i = 0; i < C::kFold; ++i) {
                const uint32_t kv_strand = i * C::kNodes + node;
                partials[i] = {Float4{}, kNoPositions, 0};
                if (first_tile(kv_strand) < end_of_tiles()) {
                    partials[i] = partial_of(partials_.kv_strands[kv_strand][query], index4);
                }
                if (kv_strand == own) {
                    partials[i] = merge(
                        partials[i],
                        partial_of(consumer_.here(C::kOwnPartials +
                                                  (first_head() + query) * Dims::kPartialFloat4s),
                                   index4));
                }
                partials[i] = {untagged(partials[i].sum), untagged(partials[i].maximum),
                               untagged(partials[i].weight)};
            }
            const Partial whole = merge_all<C::kFold>(partials);
            const bool is_rest = index4 == Dims::kHeadFloat4s;
            mem::store_plain(&partials_.nodes[node][query][index4],
                             is_rest ? Float4{{whole.maximum, whole.weight, 0, 0}} : whole.sum);
        });
    }

    // Merges the kNodes partial results of merge_kv_strands(), and stages each query's result for
    // the output projection. Called by all consumer warps, when they have met after
    // merge_kv_strands().
    KCCL_DECODE void merge_nodes() {
        for_each_float4(1, [&](uint32_t, uint32_t query, uint32_t index4) {
            if (index4 == Dims::kHeadFloat4s) return;
            Partial partials[C::kNodes];
            KCCL_UNROLL
            for (uint32_t i = 0; i < C::kNodes; ++i) {
                partials[i] = partial_of(partials_.nodes[i][query], index4);
            }
            const uint32_t head = kv_head_ * Dims::kHeadsPerKv + query % Dims::kHeadsPerKv;
            const float sink = sink_of<S>(consumer_.task(), layer_, lane_, head);
            const Float4 attended = attended_by(with_sink<S>(merge_all<C::kNodes>(partials), sink));
            const uint32_t column = head * Dims::kHeadFloat4s + index4;
            const uint32_t slot = C::kAttended + lane_ * C::OutPlan::kTiles * C::kStripe +
                                  C::at(column, number_ + query / Dims::kHeadsPerKv);
            mem::store_plain(reinterpret_cast<StagedFloat4*>(consumer_.here(slot)),
                             split<typename Dims::Out::Format::Operand>(attended));
        });
    }

  private:
    KCCL_DECODE uint32_t first_head() const { return C::first_head(lane_, kv_head_, number_); }

    // Returns the first position that `position` sees, which depends on the window.
    KCCL_DECODE uint32_t first_seen(uint32_t position) const {
        return window_ != 0 && position >= window_ ? position - window_ + 1 : 0;
    }
    // first_tile() returns the number of the first tile of a KV strand that one of the queries
    // sees. end_of_tiles() returns the number behind the last tile that they see.
    KCCL_DECODE uint32_t first_tile(uint32_t kv_strand) const {
        const uint32_t first = first_seen(position_) / kTileRows;
        return first + (kv_strand + S::kKvStrands - first % S::kKvStrands) % S::kKvStrands;
    }
    KCCL_DECODE uint32_t end_of_tiles() const { return ceil_div(position_ + num_ - 1, kTileRows); }

    // Returns float4 `index4` of the head, with the maximum and the weight, of a partial result in
    // memory.
    KCCL_DECODE static Partial partial_of(const Float4* partial, uint32_t index4) {
        const Float4 rest = mem::load_plain(partial + Dims::kHeadFloat4s);
        return {mem::load_plain(partial + index4), rest.value[0], rest.value[1]};
    }

    // Calls f(node, query, index4) for each float4 of the partial results of `num_nodes` nodes, for
    // the queries that exist: the chunk's last query group may have fewer. The threads of the
    // consumer warps share the calls.
    template <class F>
    KCCL_DECODE void for_each_float4(uint32_t num_nodes, F f) {
        const uint32_t each = num_ * Dims::kHeadsPerKv * Dims::kPartialFloat4s;
        for (uint32_t i = consumer_.index(); i < num_nodes * each;
             i += PrefillConsumer<S>::kThreads) {
            f(i / each, i % each / Dims::kPartialFloat4s, i % Dims::kPartialFloat4s);
        }
    }

    PrefillConsumer<S>& consumer_;
    typename C::Partials& partials_;
    const uint32_t num_query_groups_;
    const uint32_t number_;  // the query group's first position, counted in the chunk
    const uint32_t num_;     // how many positions the query group has
    const uint32_t position_;
    const uint32_t layer_;
    const uint32_t window_;
    const uint32_t kv_head_;  // number in the lane
    const uint32_t lane_;     // number among this rank's lanes
    const uint8_t* const cache_;
};

template <class S>
KCCL_DECODE void attend_by_strands(PrefillConsumer<S>& consumer, const PromptChunk& chunk,
                                   uint32_t layer, uint32_t window) {
    using Dims = Shape<S>;
    const uint32_t num =
        Dims::kLanesPerGroup * S::kKvHeads * ceil_div(chunk.num, ChunkLayout<S>::kTogether);
    for (uint32_t work_item = consumer.block_in_squad(); work_item < num;
         work_item += consumer.squad_blocks()) {
        ChunkAttention<S> attention(consumer, chunk, layer, window, work_item);
        attention.run();
        consumer.meet();
        attention.merge_kv_strands();
        consumer.meet();
        attention.merge_nodes();
    }
}

template <class S>
KCCL_DECODE void attend_chunk(PrefillConsumer<S>& consumer, const PromptChunk& chunk,
                              uint32_t layer, uint32_t window) {
    if constexpr (kAttendsByQueries<S>) {
        attend_by_tiles(consumer, chunk, layer, window);
    } else {
        attend_by_strands(consumer, chunk, layer, window);
    }
}

}  // namespace kccl::decode
