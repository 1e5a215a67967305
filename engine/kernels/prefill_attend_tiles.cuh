// Attention of a chunk, 16 queries of a KV head at a time (prefill_attend_warp.cuh). The warps of a
// block leave their splits' results in shared memory, and the block merges these. Warps of the same
// split and different queries read the same tiles at about the same time, so most of these come
// from the multiprocessor's own cache.
#pragma once

#include "prefill_attend_warp.cuh"

namespace kccl::decode {

// Attention of a work item: up to TilePlan::kGroups query groups of a KV head.
template <class S>
class TileAttention {
  public:
    using Dims = Shape<S>;
    using C = ChunkLayout<S>;
    using Plan = TilePlan<S>;

    // Returns the number of work items of the lane group.
    KCCL_DECODE static uint32_t num_items(const PromptChunk& chunk) {
        return Dims::kLanesPerGroup * S::kKvHeads * items_of_head(chunk);
    }

    KCCL_DECODE TileAttention(PrefillConsumer<S>& consumer, const PromptChunk& chunk,
                              uint32_t layer, uint32_t window, uint32_t work_item)
        : consumer_(consumer),
          areas_(consumer.shared().template in_stages<typename Plan::Area>()),
          num_queries_(chunk.num * Dims::kHeadsPerKv),
          first_query_(work_item % items_of_head(chunk) * Plan::kGroups * Plan::kQueries),
          position_(chunk.first),
          layer_(layer),
          window_(window),
          kv_head_(work_item / items_of_head(chunk) % S::kKvHeads),
          lane_(consumer.first_lane_here() + work_item / items_of_head(chunk) / S::kKvHeads),
          cache_(cache_of<S>(consumer.task(), layer, lane_, kv_head_)) {}

    // Goes through this warp's KV strands, and leaves the split's result for each query of its
    // group in shared memory.
    KCCL_DECODE void run() {
        const uint32_t warp_index = consumer_.warp_index();
        const uint32_t group = warp_index / Plan::kParts / Plan::kSplits;
        const uint32_t split = warp_index / Plan::kParts % Plan::kSplits;
        const uint32_t part = warp_index % Plan::kParts;
        const uint32_t first = first_query_ + group * Plan::kQueries;
        if (warp_index >= Plan::kWarps || first >= num_queries_) return;
        WarpOfQueries<S>(consumer_, areas_.of_warp[warp_index], cache_, part,
                         C::first_head(lane_, kv_head_, 0), first,
                         least_of(first + Plan::kQueries, num_queries_), position_, window_)
            .run(split);
    }

    // Merges the splits' results, and stages each query's result for the output projection. Called
    // by all consumer warps, when they have met after run().
    KCCL_DECODE void merge_splits() {
        const uint32_t left = num_queries_ - first_query_;
        const uint32_t num = least_of(left, Plan::kGroups * Plan::kQueries) * Dims::kHeadFloat4s;
        for (uint32_t i = consumer_.index(); i < num; i += PrefillConsumer<S>::kThreads) {
            const uint32_t in_item = i / Dims::kHeadFloat4s, index4 = i % Dims::kHeadFloat4s;
            const uint32_t group = in_item / Plan::kQueries, part = index4 / Plan::kFloat4s;
            Partial partials[Plan::kSplits];
            KCCL_UNROLL
            for (uint32_t k = 0; k < Plan::kSplits; ++k) {
                const Float4* const of_query = areas_.of_warp[Plan::warp_of(group, k, part)] +
                                               in_item % Plan::kQueries * Plan::kOfQuery;
                const Float4 rest = mem::load_plain(of_query + Plan::kFloat4s);
                partials[k] = {mem::load_plain(of_query + index4 % Plan::kFloat4s), rest.value[0],
                               rest.value[1]};
            }
            const uint32_t query = first_query_ + in_item;
            const uint32_t head = kv_head_ * Dims::kHeadsPerKv + query % Dims::kHeadsPerKv;
            const float sink = sink_of<S>(consumer_.task(), layer_, lane_, head);
            const Partial whole = merge_all<Plan::kSplits>(partials);
            const Float4 attended = attended_by(with_sink<S>(whole, sink));
            const uint32_t slot =
                C::kAttended + lane_ * C::OutPlan::kTiles * C::kStripe +
                C::at(head * Dims::kHeadFloat4s + index4, query / Dims::kHeadsPerKv);
            mem::store_plain(reinterpret_cast<StagedFloat4*>(consumer_.here(slot)),
                             split<typename Dims::Out::Format::Operand>(attended));
        }
    }

  private:
    KCCL_DECODE static uint32_t items_of_head(const PromptChunk& chunk) {
        return ceil_div(chunk.num * Dims::kHeadsPerKv, Plan::kGroups * Plan::kQueries);
    }

    PrefillConsumer<S>& consumer_;
    typename Plan::Area& areas_;
    const uint32_t num_queries_;  // of the KV head, in the chunk
    const uint32_t first_query_;  // of the work item
    const uint32_t position_;     // the chunk's first one
    const uint32_t layer_;
    const uint32_t window_;
    const uint32_t kv_head_;  // number in the lane
    const uint32_t lane_;     // number among this rank's lanes
    const uint8_t* const cache_;
};

// Called by all consumer warps.
template <class S>
KCCL_DECODE void attend_by_tiles(PrefillConsumer<S>& consumer, const PromptChunk& chunk,
                                 uint32_t layer, uint32_t window) {
    const uint32_t blocks = consumer.squad_blocks();
    const uint32_t num = TileAttention<S>::num_items(chunk);
    const uint32_t block = consumer.block_in_squad();
    for (uint32_t first = 0; first < num; first += blocks) {
        // Other warps may still read the results of the last work item.
        if (first != 0) consumer.meet();
        // Work items of later positions see more keys. So every second turn gives them to the
        // blocks in the opposite order.
        const uint32_t work_item = first + (first / blocks % 2 == 0 ? block : blocks - 1 - block);
        if (work_item >= num) continue;
        TileAttention<S> attention(consumer, chunk, layer, window, work_item);
        attention.run();
        consumer.meet();
        attention.merge_splits();
    }
}

}  // namespace kccl::decode
