// Prepares the output projection in a model where attention leaves a partial result for each KV
// split (not S::kMergesFirst). Each warp merges the partial results of the columns that it
// multiplies.
#pragma once

#include "partials.cuh"
#include "vectors.cuh"

namespace kccl::decode {

// Waits for the partial results of this warp's part of each lane's vector, merges them, and stages
// the result. Several threads share the KV splits of a float4, so that each thread loads few
// partial results.
template <class M, class S>
KCCL_DECODE void stage_partials(ConsumerWarp<S>& consumer, uint32_t layer) {
    using Dims = Shape<S>;
    constexpr uint32_t kOfColumn = M::kFloat4s * M::kLanes, kTotal = S::kColumns * kOfColumn;
    constexpr uint32_t sharers = [] {
        uint32_t n = 1;
        while (n < S::kKvSplits && 2 * n * kTotal <= platform::kWarpSize) n *= 2;
        // With several columns, a thread waits for at most eight partial results at the same time.
        while (S::kColumns > 1 && S::kKvSplits / n > 8) n *= 2;
        return n;
    }();
    constexpr uint32_t kMine = S::kKvSplits / sharers;
    constexpr uint32_t kAtOnce = platform::kWarpSize / sharers;
    const uint32_t sharer = consumer.thread() % sharers;
    const uint32_t first = first_float4<M>(consumer);
    const uint32_t total = consumer.num_columns() * kOfColumn;
    for (uint32_t start = 0; start < total; start += kAtOnce) {
        const OwnRows rows = rows_at<kOfColumn>(consumer, start + consumer.thread() / sharers);
        const uint32_t at = rows.index4;
        const uint32_t lane = at / M::kFloat4s, column = first + at % M::kFloat4s;
        const bool is_there =
            lane < M::kLanes && column < M::kColumns / 4 && is_used(consumer, rows.column);
        const uint32_t head = is_there ? column / Dims::kHeadFloat4s : 0;
        const uint32_t base = is_there
                                  ? Slots<S>::partial(layer, consumer.first_lane() + lane, head) +
                                        sharer * Dims::kPartialFloat4s
                                  : 0;
        const float sink =
            sink_of<S>(consumer.task(), layer, is_there ? lane : 0, is_there ? head : 0);
        uint32_t slots[2 * kMine];
        Float4 float4s[2 * kMine];
        KCCL_UNROLL
        for (uint32_t i = 0; i < kMine; ++i) {
            const uint32_t partial =
                Slots<S>::in_column(base + i * sharers * Dims::kPartialFloat4s, rows.column);
            slots[2 * i] = partial + column % Dims::kHeadFloat4s;
            slots[2 * i + 1] = partial + Dims::kHeadFloat4s;
        }
        consumer.template await<mem::Scope::kDevice>(slots, is_there ? ~0u : 0,
                                                     consumer.tag(rows.column), float4s);
        Partial partials[kMine];
        KCCL_UNROLL
        for (uint32_t i = 0; i < kMine; ++i) {
            partials[i] = {float4s[2 * i], float4s[2 * i + 1].value[0],
                           float4s[2 * i + 1].value[1]};
        }
        const Partial whole = merge_shared<sharers>(merge_all<kMine>(partials), consumer.thread());
        const Float4 four = is_there ? attended_by(with_sink<S>(whole, sink)) : Float4{};
        if (sharer == 0 && has_rows(consumer, rows, kOfColumn)) {
            stage<M>(consumer, at, four, rows.column);
        }
    }
}

}  // namespace kccl::decode
