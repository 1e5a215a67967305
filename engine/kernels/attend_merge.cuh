// The work items of attention, and what becomes of their partial results. A work item is one KV
// head and one KV split. Block b of a lane group takes the work items b, b + kBlocksPerGroup, ...
// Each KV split gives a partial result. With S::kMergesFirst, the blocks of a KV head exchange
// their partial results, and each block merges its share of the head's elements. Without it, the
// output projection merges them (out.cuh). A query is a query head of a column; each has results of
// its own.
#pragma once

#include "partials.cuh"
#include "vectors.cuh"

namespace kccl::decode {

template <class S>
struct WorkItem {
    KCCL_DECODE explicit WorkItem(uint32_t number)
        : lane(number / S::kKvSplits / S::kKvHeads),
          kv_head(number / S::kKvSplits % S::kKvHeads),
          kv_split(number % S::kKvSplits) {}

    const uint32_t lane;     // number in the lane group
    const uint32_t kv_head;  // number in the lane
    const uint32_t kv_split;
};

// Returns the number, within a KV split, of the KV strand that a position belongs to. Returns
// kKvStrandsPerSplit if the position belongs to another KV split.
template <class S>
KCCL_DECODE uint32_t own_kv_strand_of(uint32_t kv_split, uint32_t position) {
    const uint32_t kv_strand = position / kTileRows % S::kKvStrands;
    return kv_strand % S::kKvSplits == kv_split ? kv_strand / S::kKvSplits
                                                : Shape<S>::kKvStrandsPerSplit;
}

// Returns float4 `at` of the head, with the maximum and the weight, of a partial result in memory.
template <class S>
KCCL_DECODE Partial partial_of(const Float4* partial, uint32_t at) {
    const Float4 rest = mem::load_plain(partial + Shape<S>::kHeadFloat4s);
    return {mem::load_plain(partial + at), rest.value[0], rest.value[1]};
}

// Returns where the partial result of a position's attention to itself lies in shared memory.
template <class S>
KCCL_DECODE Float4* own_partial(Shared<S>& shared, uint32_t query) {
    if constexpr (kStagesPartials<S>) {
        constexpr uint32_t kHeads = Shape<S>::kHeadsPerKv;
        const uint32_t column = query / kHeads;
        const uint32_t number = column / S::kWarps * kHeads + query % kHeads;
        return reinterpret_cast<Float4*>(shared.staged[column % S::kWarps]) +
               StagedPartials<S>::kOwn + number * Shape<S>::kPartialFloat4s;
    } else {
        return shared.own[query];
    }
}

// Merges the partial results that the block's warps have left in shared memory, and publishes the
// partial result of the KV split. position: that of column 0. Called by all consumer warps, when
// they have met after that.
template <class S>
KCCL_DECODE void publish_partials(ConsumerWarp<S>& consumer, uint32_t layer,
                                  const WorkItem<S>& work_item, uint32_t position) {
    using Dims = Shape<S>;
    constexpr uint32_t kOfColumn = Dims::kHeadsPerKv * Dims::kPartialFloat4s;
    constexpr uint32_t kFloat4s = S::kColumns * kOfColumn;
    // kSharers neighbouring threads share the KV strands of a float4: as many as let each thread
    // have one float4. In two turns, they would take longer than alone.
    constexpr uint32_t kSharers = [] {
        uint32_t n = 1;
        while (n < Dims::kKvStrandsPerSplit && 2 * n * kFloat4s <= Dims::kConsumerThreads) n *= 2;
        return n;
    }();
    constexpr uint32_t kMine = Dims::kKvStrandsPerSplit / kSharers;
    constexpr uint32_t kAtOnce = Dims::kConsumerThreads / kSharers;
    const uint32_t only = own_kv_strand_of<S>(work_item.kv_split, position);
    const uint32_t sharer = consumer.thread() % kSharers;
    KCCL_UNROLL
    for (uint32_t first = 0; first < kFloat4s; first += kAtOnce) {
        if (S::kColumns > 1 && first >= consumer.num_columns() * kOfColumn) break;
        const uint32_t index4 = first + float4_of_warp<platform::kWarpSize / kSharers>(
                                            consumer, consumer.thread() / kSharers);
        const bool is_there = index4 < kFloat4s;
        const uint32_t query = is_there ? index4 / Dims::kPartialFloat4s : 0;
        const uint32_t at = is_there ? index4 % Dims::kPartialFloat4s : 0;
        const uint32_t column = S::kColumns == 1 ? 0 : query / Dims::kHeadsPerKv;
        const uint32_t head = S::kColumns == 1 ? query : query % Dims::kHeadsPerKv;
        const uint32_t own =
            S::kColumns == 1
                ? only
                : own_kv_strand_of<S>(work_item.kv_split,
                                      position_of<S>(consumer.task(), position, column));
        Partial partials[kMine];
        KCCL_UNROLL
        for (uint32_t i = 0; i < kMine; ++i) {
            const uint32_t kv_strand = i * kSharers + sharer;
            Partial partial = partial_of<S>(consumer.partial(kv_strand, query), at);
            if (kv_strand == own) {
                partial = merge(partial, partial_of<S>(own_partial(consumer.shared(), query), at));
            }
            partials[i] = {untagged(partial.sum), untagged(partial.maximum),
                           untagged(partial.weight)};
        }
        const Partial whole = merge_shared<kSharers>(merge_all<kMine>(partials), consumer.thread());
        if (!is_there || sharer != 0 || !is_used(consumer, column)) continue;
        const uint32_t slot = Slots<S>::partial(layer, consumer.first_lane() + work_item.lane,
                                                work_item.kv_head * Dims::kHeadsPerKv + head) +
                              work_item.kv_split * Dims::kPartialFloat4s + at;
        const bool is_rest = at == Dims::kHeadFloat4s;
        consumer.publish(slot, is_rest ? Float4{{whole.maximum, whole.weight, 0, 0}} : whole.sum,
                         column);
    }
}

// Waits for the partial results of all KV splits of the KV head, merges them for this block's share
// of the head's elements, and publishes the result. Called by all consumer warps, after the block
// has published the partial results of all of its work items. Otherwise two blocks could wait for
// each other's partial results.
template <class S>
KCCL_DECODE void publish_share(ConsumerWarp<S>& consumer, uint32_t layer,
                               const WorkItem<S>& work_item) {
    using Dims = Shape<S>;
    constexpr uint32_t kFloat4s = Dims::kHeadsPerKv * Dims::kHeadFloat4s;
    // A column has a thread for each float4 of the share and each KV split.
    constexpr uint32_t kOfColumn = ceil_div(kFloat4s, S::kKvSplits) * S::kKvSplits;
    constexpr uint32_t kThreads = S::kColumns * kOfColumn;
    const Cut share = cut(kFloat4s, work_item.kv_split, S::kKvSplits);
    const uint32_t lane = consumer.first_lane() + work_item.lane;
    KCCL_UNROLL
    for (uint32_t first = 0; first < kThreads; first += Dims::kConsumerThreads) {
        const uint32_t of_warp = first + consumer.warp_index() * platform::kWarpSize;
        if (of_warp >=
            (S::kColumns == 1 ? share.num * S::kKvSplits : consumer.num_columns() * kOfColumn)) {
            break;
        }
        const OwnRows rows = rows_at<kOfColumn>(consumer, of_warp + consumer.thread());
        const uint32_t thread = rows.index4, kv_split = thread % S::kKvSplits;
        const bool is_there = thread / S::kKvSplits < share.num && is_used(consumer, rows.column);
        const uint32_t index4 = share.first + (is_there ? thread / S::kKvSplits : 0);
        const uint32_t head = work_item.kv_head * Dims::kHeadsPerKv + index4 / Dims::kHeadFloat4s;
        const uint32_t partial = Slots<S>::in_column(
            Slots<S>::partial(layer, lane, head) + kv_split * Dims::kPartialFloat4s, rows.column);
        const uint32_t slots[] = {partial + index4 % Dims::kHeadFloat4s,
                                  partial + Dims::kHeadFloat4s};
        const float sink = sink_of<S>(consumer.task(), layer, work_item.lane, head);
        Float4 float4s[2];
        consumer.template await<mem::Scope::kDevice>(slots, is_there ? 3u : 0,
                                                     consumer.tag(rows.column), float4s);
        const Partial mine = {float4s[0], float4s[1].value[0], float4s[1].value[1]};
        const Partial whole = merge_shared<S::kKvSplits>(mine, consumer.thread());
        if (!is_there || kv_split != 0) continue;
        consumer.publish_attended(
            Slots<S>::attended(layer, lane) + work_item.kv_head * kFloat4s + index4,
            attended_by(with_sink<S>(whole, sink)), rows.column);
    }
}

// Does what publish_share() does, in a kernel with seats: a thread waits for all its float4s at the
// same time.
template <class S>
KCCL_DECODE void publish_share_of_seats(ConsumerWarp<S>& consumer, uint32_t layer,
                                        const WorkItem<S>& work_item) {
    using Dims = Shape<S>;
    constexpr uint32_t kFloat4s = Dims::kHeadsPerKv * Dims::kHeadFloat4s;
    constexpr uint32_t kOfColumn = ceil_div(kFloat4s, S::kKvSplits) * S::kKvSplits;
    constexpr uint32_t kEach = ceil_div(S::kColumns * kOfColumn, Dims::kConsumerThreads);
    const Cut share = cut(kFloat4s, work_item.kv_split, S::kKvSplits);
    const uint32_t lane = consumer.first_lane() + work_item.lane;
    struct Mine {
        uint32_t column;
        uint32_t index4;  // in the KV head
        uint32_t head;
        bool is_there;
    };
    const uint32_t kv_split = consumer.thread() % S::kKvSplits;
    const auto mine_at = [&](uint32_t i) -> Mine {
        const OwnRows rows = rows_at<kOfColumn>(
            consumer, i * Dims::kConsumerThreads + consumer.warp_index() * platform::kWarpSize +
                          consumer.thread());
        const uint32_t of_share = rows.index4 / S::kKvSplits;
        const bool is_there = of_share < share.num && is_used(consumer, rows.column);
        const uint32_t index4 = share.first + (is_there ? of_share : 0);
        return {rows.column, index4,
                work_item.kv_head * Dims::kHeadsPerKv + index4 / Dims::kHeadFloat4s, is_there};
    };
    uint32_t slots[2 * kEach], wanted = 0, tags = 0;
    float sinks[kEach];
    KCCL_UNROLL
    for (uint32_t i = 0; i < kEach; ++i) {
        const Mine mine = mine_at(i);
        const uint32_t partial = Slots<S>::in_column(
            Slots<S>::partial(layer, lane, mine.head) + kv_split * Dims::kPartialFloat4s,
            mine.column);
        slots[2 * i] = partial + mine.index4 % Dims::kHeadFloat4s;
        slots[2 * i + 1] = partial + Dims::kHeadFloat4s;
        wanted |= mine.is_there ? 3u << 2 * i : 0;
        tags |= consumer.tag(mine.column) << i;
        sinks[i] = sink_of<S>(consumer.task(), layer, work_item.lane, mine.head);
    }
    Float4 float4s[2 * kEach];
    consumer.template await<mem::Scope::kDevice>(slots, wanted, ColumnTags<2>{tags}, float4s);
    KCCL_UNROLL
    for (uint32_t i = 0; i < kEach; ++i) {
        const Mine mine = mine_at(i);
        const Float4& rest = float4s[2 * i + 1];
        const Partial whole = merge_shared<S::kKvSplits>(
            Partial{float4s[2 * i], rest.value[0], rest.value[1]}, consumer.thread());
        if (!mine.is_there || kv_split != 0) continue;
        consumer.publish_attended(
            Slots<S>::attended(layer, lane) + work_item.kv_head * kFloat4s + mine.index4,
            attended_by(with_sink<S>(whole, sinks[i])), mine.column);
    }
}

// Computes attention for the block's work items, and publishes the results. run(work_item) leaves
// partial results in shared memory. position: that of column 0. Called by all consumer warps.
// Returns false if a wait failed.
template <class S, class Run>
KCCL_DECODE bool for_work_items(ConsumerWarp<S>& consumer, uint32_t layer, uint32_t position,
                                Run run) {
    using Dims = Shape<S>;
    for (uint32_t number = consumer.block_in_group(); number < Dims::kWorkItems;
         number += Dims::kBlocksPerGroup) {
        consumer.next_op();
        const WorkItem<S> work_item(number);
        run(work_item);
        consumer.stamp(kKcclDecodeMultiplied);
        if (!consumer.meet()) return false;
        consumer.stamp(kKcclDecodeMet);
        publish_partials(consumer, layer, work_item, position);
        // The warps meet again, because the next work item overwrites the partial results in shared
        // memory.
        if (Dims::kWorkItems > Dims::kBlocksPerGroup && !consumer.meet()) return false;
    }
    if constexpr (S::kMergesFirst) {
        for (uint32_t number = consumer.block_in_group(); number < Dims::kWorkItems;
             number += Dims::kBlocksPerGroup) {
            if constexpr (S::kHasSeats) {
                publish_share_of_seats(consumer, layer, WorkItem<S>(number));
            } else {
                publish_share(consumer, layer, WorkItem<S>(number));
            }
        }
    }
    consumer.end_op();
    return true;
}

}  // namespace kccl::decode
