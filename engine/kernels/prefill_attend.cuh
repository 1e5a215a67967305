// Attention of a chunk. First each position's key and value go into the cache, with norm and RoPE.
// Then, when the group's blocks have done that, each position looks at those before it: also those
// of the same chunk come from the cache. A block takes some query groups: a KV head's queries of
// kTogether neighbouring positions, which share its keys and values. Parts are merged as decode
// merges them.
#pragma once

#include "attend.cuh"
#include "prefill_product.cuh"

namespace kccl::decode {

// Norm and RoPE of the chunk's queries and keys; fills the cache. A warp does a position of a KV
// head.
template <class S>
KCCL_DEVICE void turn_chunk(Crew<S>& crew, const Pass& pass, uint32_t layer) {
    using Dims = Shape<S>;
    using C = Chunk<S>;
    constexpr uint32_t kHeads = Dims::kHeadsPerKv;
    const uint32_t thread = mem::forget(warp().index());
    const bool is_there = thread < Dims::kHeadQuads;
    const uint32_t num = Dims::kGroupLanes * S::kKvHeads * pass.num;
    for (uint32_t i = crew.warp_index() * Dims::kGroupBlocks + crew.member(); i < num;
         i += S::kChunkWarps * Dims::kGroupBlocks) {
        const uint32_t number = i % pass.num, kv_head = i / pass.num % S::kKvHeads;
        const uint32_t lane = crew.first_lane_here() + i / pass.num / S::kKvHeads;
        const uint32_t position = pass.first + number;
        const auto head_of = [&](uint32_t head) {
            const uint32_t quad = head * Dims::kHeadQuads + (is_there ? thread : 0);
            const uint32_t place =
                C::kQkv + lane * (Dims::kQkvRows / kTileRows) * C::kStripe + C::at(quad, number);
            return is_there ? mem::load_plain(crew.here(place)) : Quad{};
        };
        const uint32_t first = C::first_head(lane, kv_head, number);
        auto* const staged =
            reinterpret_cast<StagedQuad*>(crew.here(C::kQueriesAt + first * Dims::kHeadQuads));
        const uint64_t turns = uint64_t{position} * (S::kHeadDim / 2);
        const auto* const cosines = reinterpret_cast<const float*>(crew.task().cosines) + turns;
        const auto* const sines = reinterpret_cast<const float*>(crew.task().sines) + turns;
        Quad queries[kHeads];
        KCCL_UNROLL
        for (uint32_t head = 0; head < kHeads; ++head) {
            Quad& quad = queries[head];
            quad = turned<S>(crew.task(), head_of(kv_head * kHeads + head), layer, false, cosines,
                             sines);
            for (float& value : quad.value) value *= S::kAttentionScale * kLog2E;
            if (is_there) {
                mem::store_plain(staged + head * Dims::kHeadQuads + thread, split<f16>(quad));
            }
        }
        const Quad key =
            turned<S>(crew.task(), head_of(S::kHeads + kv_head), layer, true, cosines, sines);
        const Quad value = head_of(S::kHeads + S::kKvHeads + kv_head);
        uint8_t* const tile = cache_of<S>(crew.task(), layer, lane, kv_head) +
                              uint64_t{position / kTileRows} * Dims::kCacheTileBytes;
        append<S>(crew.task(), crew.comm().rank, tile, position, key, value);
        Part own[kHeads];
        attend_itself<S>(queries, key, value, own);
        store_parts<S>(crew.here(C::kOwnParts + first * Dims::kPartQuads), own);
    }
}

// The attention of a query group.
template <class S>
class ChunkAttention {
  public:
    using Dims = Shape<S>;
    using C = Chunk<S>;

    KCCL_DEVICE ChunkAttention(Crew<S>& crew, const Pass& pass, uint32_t layer, uint32_t window,
                               uint32_t unit)
        : crew_(crew),
          parts_(crew.shared().parts()),
          num_groups_(ceil_div(pass.num, C::kTogether)),
          number_(unit % num_groups_ * C::kTogether),
          num_(pass.num - number_ < C::kTogether ? pass.num - number_ : C::kTogether),
          position_(pass.first + number_),
          window_(window),
          kv_head_(unit / num_groups_ % S::kKvHeads),
          lane_(crew.first_lane_here() + unit / num_groups_ / S::kKvHeads),
          cache_(cache_of<S>(crew.task(), layer, lane_, kv_head_)) {}

    // Goes through this warp's strands.
    KCCL_DEVICE void run() {
        const Lanes<C::kQueries> lanes(kTileQuads);
        const auto* const staged = reinterpret_cast<const StagedQuad*>(
            crew_.here(C::kQueriesAt + first_head() * Dims::kHeadQuads));
        typename Strand<S, C::kQueries>::Queries queries;
        Strand<S, C::kQueries>::load(queries, staged);
        for (uint32_t i = crew_.warp_index(); i < S::kStrands; i += S::kChunkWarps) {
            if (first_tile(i) >= end_of_tiles()) continue;
            Strand<S, C::kQueries> strand(crew_.shared().strands[crew_.warp_index()], lanes);
#pragma unroll 1
            for (uint32_t at = first_tile(i); at < end_of_tiles(); at += S::kStrands) {
                CacheTile<S> tile;
                tile.load_keys(lanes.of(0), cache_ + uint64_t{at} * Dims::kCacheTileBytes);
                tile.load_values(lanes.of(0), cache_ + uint64_t{at} * Dims::kCacheTileBytes);
                strand.add(tile, queries, [&](uint32_t query, uint32_t in_tile) {
                    const uint32_t mine = position_ + query / Dims::kHeadsPerKv;
                    const uint32_t seen = at * kTileRows + in_tile;
                    return seen >= first_seen(mine) && seen < mine;
                });
            }
            strand.store(parts_.strands[i]);
        }
    }

    // Merges the first half of the tree. All warps, when they have met.
    KCCL_DEVICE void merge_strands() {
        for_each_quad(C::kNodes, [&](uint32_t node, uint32_t query, uint32_t quad) {
            const uint32_t own = (position_ + query / Dims::kHeadsPerKv) / kTileRows % S::kStrands;
            Part parts[C::kFold];
            KCCL_UNROLL
            for (uint32_t i = 0; i < C::kFold; ++i) {
                const uint32_t strand = i * C::kNodes + node;
                parts[i] = {Quad{}, kNoPositions, 0};
                if (first_tile(strand) < end_of_tiles()) {
                    parts[i] = part_of(parts_.strands[strand][query], quad);
                }
                if (strand == own) {
                    parts[i] =
                        merge(parts[i], part_of(crew_.here(C::kOwnParts + (first_head() + query) *
                                                                              Dims::kPartQuads),
                                                quad));
                }
                parts[i] = {untagged(parts[i].sum), untagged(parts[i].maximum),
                            untagged(parts[i].weight)};
            }
            const Part whole = merge_all<C::kFold>(parts);
            const bool is_rest = quad == Dims::kHeadQuads;
            mem::store_plain(&parts_.nodes[node][query][quad],
                             is_rest ? Quad{{whole.maximum, whole.weight, 0, 0}} : whole.sum);
        });
    }

    // Merges the rest, and stages the result. All warps, when they have met.
    KCCL_DEVICE void merge_nodes() {
        for_each_quad(1, [&](uint32_t, uint32_t query, uint32_t quad) {
            if (quad == Dims::kHeadQuads) return;
            Part parts[C::kNodes];
            KCCL_UNROLL
            for (uint32_t i = 0; i < C::kNodes; ++i) {
                parts[i] = part_of(parts_.nodes[i][query], quad);
            }
            const Quad attended = attended_by(merge_all<C::kNodes>(parts));
            const uint32_t head = kv_head_ * Dims::kHeadsPerKv + query % Dims::kHeadsPerKv;
            const uint32_t column = head * Dims::kHeadQuads + quad;
            const uint32_t place = C::kAttended + lane_ * C::OutPlan::kTiles * C::kStripe +
                                   C::at(column, number_ + query / Dims::kHeadsPerKv);
            mem::store_plain(reinterpret_cast<StagedQuad*>(crew_.here(place)),
                             split<typename S::Weight>(attended));
        });
    }

  private:
    KCCL_DEVICE uint32_t first_head() const { return C::first_head(lane_, kv_head_, number_); }

    // The first position that a position sees.
    KCCL_DEVICE uint32_t first_seen(uint32_t position) const {
        return window_ != 0 && position >= window_ ? position - window_ + 1 : 0;
    }
    // The first tile of a strand that one of the queries sees, and behind the last one.
    KCCL_DEVICE uint32_t first_tile(uint32_t strand) const {
        const uint32_t first = first_seen(position_) / kTileRows;
        return first + (strand + S::kStrands - first % S::kStrands) % S::kStrands;
    }
    KCCL_DEVICE uint32_t end_of_tiles() const { return ceil_div(position_ + num_ - 1, kTileRows); }

    // This thread's quad of a part that is stored.
    KCCL_DEVICE static Part part_of(const Quad* part, uint32_t quad) {
        const Quad rest = mem::load_plain(part + Dims::kHeadQuads);
        return {mem::load_plain(part + quad), rest.value[0], rest.value[1]};
    }

    // f(node, query, quad), for the queries that are there.
    template <class F>
    KCCL_DEVICE void for_each_quad(uint32_t num_nodes, F f) {
        const uint32_t each = num_ * Dims::kHeadsPerKv * Dims::kPartQuads;
        for (uint32_t i = crew_.index(); i < num_nodes * each; i += Crew<S>::kThreads) {
            f(i / each, i % each / Dims::kPartQuads, i % Dims::kPartQuads);
        }
    }

    Crew<S>& crew_;
    typename C::Parts& parts_;
    const uint32_t num_groups_;
    const uint32_t number_;  // of the first position, in the chunk
    const uint32_t num_;     // of positions
    const uint32_t position_;
    const uint32_t window_;
    const uint32_t kv_head_;  // of the lane
    const uint32_t lane_;     // of this rank's
    const uint8_t* const cache_;
};

template <class S>
KCCL_DEVICE void attend_chunk(Crew<S>& crew, const Pass& pass, uint32_t layer, uint32_t window) {
    using Dims = Shape<S>;
    const uint32_t num = Dims::kGroupLanes * S::kKvHeads * ceil_div(pass.num, Chunk<S>::kTogether);
    for (uint32_t unit = crew.member(); unit < num; unit += Dims::kGroupBlocks) {
        ChunkAttention<S> attention(crew, pass, layer, window, unit);
        attention.run();
        crew.meet();
        attention.merge_strands();
        crew.meet();
        attention.merge_nodes();
    }
}

}  // namespace kccl::decode
