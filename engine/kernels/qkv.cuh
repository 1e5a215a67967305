// Computes the queries, keys and values of the token step's positions, before norm and RoPE.
#pragma once

#include "biases.cuh"

namespace kccl::decode {

// Adds up the warps' sums of the block's rows, scales them, adds biases, and publishes the results.
// Called by all consumer warps, when they have met after the product.
template <class S>
KCCL_DECODE void finish_qkv(ConsumerWarp<S>& consumer, uint32_t layer) {
    using M = typename Shape<S>::Qkv;
    const Cut tiles = M::tiles_of(consumer.block_in_group());
    const Inverses<S> inverses(consumer);
    constexpr uint32_t kMost = M::kMostTiles * kTileFloat4s;
    for (uint32_t k = 0; k < kMostOwnRows<S, kMost>; ++k) {
        const OwnRows rows = own_rows<kMost>(consumer, k);
        if (are_behind(consumer, rows, tiles.num * kTileFloat4s)) break;
        if (!has_rows(consumer, rows, tiles.num * kTileFloat4s)) continue;
        const uint32_t index4 = rows.index4, row = tiles.first * kTileFloat4s + index4;
        const Float4 total =
            scaled<S>(consumer.task(), Product<S>::kQkv, layer, row,
                      total_of(consumer, index4 / kTileFloat4s, index4 % kTileFloat4s, rows.column),
                      inverses.of(rows.column));
        const uint32_t lane = consumer.first_lane() + row / Slots<S>::kQkvFloat4s;
        consumer.publish(Slots<S>::qkv(layer, lane) + row % Slots<S>::kQkvFloat4s, total,
                         rows.column);
    }
    consumer.end_op();
}

}  // namespace kccl::decode
