// Computes the first half of the MLP, its hidden vector: silu(gate) * up.
#pragma once

#include "biases.cuh"
#include "math.cuh"

namespace kccl::decode {

// Returns four values of the MLP's hidden vector, from the sums of four rows of the gate and the
// same rows of "up". These sums are not yet multiplied by `inverse`, which is 1 / the root of the
// residual's mean square. tile: the number of the row tile in the packed matrix. i: the number of
// the gate's float4 within the tile.
template <class S>
KCCL_DECODE Float4 act_of(const Task& task, uint32_t layer, uint32_t tile, uint32_t i,
                          const Float4& gate_sums, const Float4& up_sums, float inverse) {
    const uint32_t index4 = tile * kTileFloat4s + i;
    const Float4 gate = scaled<S>(task, Product<S>::kGateUp, layer, index4, gate_sums, inverse);
    const Float4 up =
        scaled<S>(task, Product<S>::kGateUp, layer, index4 + kTileFloat4s / 2, up_sums, inverse);
    Float4 act;
    KCCL_UNROLL
    for (int j = 0; j < 4; ++j) act.value[j] = silu(gate.value[j]) * up.value[j];
    return act;
}

// Publishes the block's values of the hidden vector of an MLP, or of the chosen experts. M: the
// product's matrix. act_of(tile, i, gate_sums, up_sums, inverse) computes four of them: see above.
// Called by all consumer warps, when they have met after the product.
template <class M, class S, class ActOf>
KCCL_DECODE void publish_acts(ConsumerWarp<S>& consumer, uint32_t layer, ActOf act_of) {
    const Cut tiles = M::tiles_of(consumer.block_in_group());
    const Inverses<S> inverses(consumer);
    // Half of a tile's rows are rows of the gate, so a tile gives half as many values.
    constexpr uint32_t kFloat4s = kTileFloat4s / 2;
    constexpr uint32_t kMost = M::kMostTiles * kFloat4s;
    for (uint32_t k = 0; k < kMostOwnRows<S, kMost>; ++k) {
        const OwnRows rows = own_rows<kMost>(consumer, k);
        if (are_behind(consumer, rows, tiles.num * kFloat4s)) break;
        if (!has_rows(consumer, rows, tiles.num * kFloat4s)) continue;
        const uint32_t tile = rows.index4 / kFloat4s, i = rows.index4 % kFloat4s;
        const Float4 gate = total_of(consumer, tile, i, rows.column);
        const Float4 up = total_of(consumer, tile, i + kFloat4s, rows.column);
        const Float4 act = act_of(tiles.first + tile, i, gate, up, inverses.of(rows.column));
        const uint32_t feature = tiles.first * kFloat4s + rows.index4;
        const uint32_t lane = consumer.first_lane() + feature / Slots<S>::kFfnFloat4s;
        consumer.publish(Slots<S>::act(layer, lane) + feature % Slots<S>::kFfnFloat4s, act,
                         rows.column);
    }
    consumer.end_op();
}

// Computes and publishes the block's values of the MLP's hidden vector. Called as publish_acts().
template <class S>
KCCL_DECODE void finish_acts(ConsumerWarp<S>& consumer, uint32_t layer) {
    publish_acts<typename Shape<S>::GateUp>(
        consumer, layer,
        [&](uint32_t tile, uint32_t i, const Float4& gate, const Float4& up, float inverse) {
            return act_of<S>(consumer.task(), layer, tile, i, gate, up, inverse);
        });
}

}  // namespace kccl::decode
