// Queries, keys and values of the current position, before norm and RoPE.
#pragma once

#include "biases.cuh"

namespace kccl::decode {

// Finishes the rows of the product. Called by all warps that multiply, when they have met.
template <class S>
KCCL_DEVICE void finish_qkv(Worker<S>& worker, uint32_t layer) {
    using M = typename Shape<S>::Qkv;
    const Cut tiles = M::tiles_of(worker.member());
    const float inverse = inverse_rms(worker);
    for (uint32_t k = 0; k < ceil_div(M::kMostTiles * kTileQuads, Shape<S>::kConsumers); ++k) {
        const uint32_t quad = own_quad(worker, k);
        if (quad >= tiles.num * kTileQuads) break;
        const uint32_t row = tiles.first * kTileQuads + quad;
        const Quad total =
            scaled<S>(worker.task(), Product<S>::kQkv, layer, row,
                      total_of(worker, quad / kTileQuads, quad % kTileQuads), inverse);
        const uint32_t lane = worker.first_lane() + row / Places<S>::kQkvQuads;
        worker.publish(Places<S>::qkv(layer, lane) + row % Places<S>::kQkvQuads, total);
    }
    worker.end_op();
}

}  // namespace kccl::decode
