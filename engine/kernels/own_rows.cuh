// The rows of a product that a block finishes: which of them a thread has, and their sums. Threads
// share the rows of all columns.
#pragma once

#include "product.cuh"

namespace kccl::decode {

// Returns the number in the block of a warp's float4 `i`. Neighbouring float4s belong to different
// warps, so that all warps have some. With several columns eight neighbours belong to a warp. Eight
// threads read shared memory at the same time, and such neighbours lie in different banks. MOST:
// the warp's float4s are a multiple of so many.
template <uint32_t MOST = platform::kWarpSize, class S>
KCCL_DECODE uint32_t float4_of_warp(const ConsumerWarp<S>& consumer, uint32_t i) {
    constexpr uint32_t kNeighbours = S::kColumns == 1 ? 1 : least_of(MOST, 8u);
    return (i / kNeighbours * S::kWarps + consumer.warp_index()) * kNeighbours + i % kNeighbours;
}

// Returns the k-th float4 of a block's rows of all columns that this thread finishes; it may lie
// behind the last one.
template <class S>
KCCL_DECODE uint32_t own_float4(const ConsumerWarp<S>& consumer, uint32_t k) {
    return float4_of_warp(consumer, k * platform::kWarpSize + consumer.thread());
}

// A float4 of a block's rows of a column.
struct OwnRows {
    uint32_t column;
    uint32_t index4;
};

// Returns the same float4 as a column's. A column has MOST float4s; the block may have fewer.
template <uint32_t MOST, class S>
KCCL_DECODE OwnRows rows_at(const ConsumerWarp<S>&, uint32_t i) {
    if constexpr (S::kColumns == 1) return {0, i};
    return {i / MOST, i % MOST};
}
template <uint32_t MOST, class S>
KCCL_DECODE OwnRows own_rows(const ConsumerWarp<S>& consumer, uint32_t k) {
    return rows_at<MOST>(consumer, own_float4(consumer, k));
}
// Tells whether the block has these rows, of which a column has `num` float4s, and the token step
// the column.
template <class S>
KCCL_DECODE bool has_rows(const ConsumerWarp<S>& consumer, const OwnRows& rows, uint32_t num) {
    return rows.index4 < num && (S::kColumns == 1 || rows.column < consumer.num_columns());
}

// How many float4s of the block's rows a thread finishes at most, where a column has at most MOST.
template <class S, uint32_t MOST>
constexpr uint32_t kMostOwnRows = ceil_div(S::kColumns * MOST, Shape<S>::kConsumerThreads);

// Tells whether these rows and all further ones of this thread lie behind the block's last ones.
// num: how many float4s of a column the block has.
template <class S>
KCCL_DECODE bool are_behind(const ConsumerWarp<S>& consumer, const OwnRows& rows, uint32_t num) {
    if constexpr (S::kColumns == 1) return rows.index4 >= num;
    return rows.column >= consumer.num_columns();
}

// Returns the sums of all warps, added in their order, for four rows of a column: float4 `index4`
// of row tile and lane `tile`.
template <class S>
KCCL_DECODE Float4 total_of(ConsumerWarp<S>& consumer, uint32_t tile, uint32_t index4,
                            uint32_t column = 0) {
    const uint32_t at = S::kColumns == 1 ? 0 : column * Shape<S>::kMostSums;
    Float4 total = {};
    KCCL_UNROLL
    for (uint32_t each = 0; each < S::kWarps; ++each) {
        const Float4 part =
            mem::load_plain(consumer.area(each) + at + tile * kTileFloat4s + index4);
        KCCL_UNROLL
        for (int i = 0; i < 4; ++i) total.value[i] += part.value[i];
    }
    return total;
}

}  // namespace kccl::decode
