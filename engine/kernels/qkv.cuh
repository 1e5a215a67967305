// Computes the queries, keys and values of the current position, before norm and RoPE.
#pragma once

#include "biases.cuh"

namespace kccl::decode {

// Adds up the warps' sums of the block's rows, scales them, adds biases, and publishes the results.
// Called by all consumer warps, when they have met after the product.
template <class S>
KCCL_DECODE void finish_qkv(ConsumerWarp<S>& consumer, uint32_t layer) {
    using M = typename Shape<S>::Qkv;
    const Cut tiles = M::tiles_of(consumer.block_in_group());
    const float inverse = inverse_rms(consumer);
    for (uint32_t k = 0; k < ceil_div(M::kMostTiles * kTileFloat4s, Shape<S>::kConsumerThreads);
         ++k) {
        const uint32_t index4 = own_float4(consumer, k);
        if (index4 >= tiles.num * kTileFloat4s) break;
        const uint32_t row = tiles.first * kTileFloat4s + index4;
        const Float4 total =
            scaled<S>(consumer.task(), Product<S>::kQkv, layer, row,
                      total_of(consumer, index4 / kTileFloat4s, index4 % kTileFloat4s), inverse);
        const uint32_t lane = consumer.first_lane() + row / Slots<S>::kQkvFloat4s;
        consumer.publish(Slots<S>::qkv(layer, lane) + row % Slots<S>::kQkvFloat4s, total);
    }
    consumer.end_op();
}

}  // namespace kccl::decode
