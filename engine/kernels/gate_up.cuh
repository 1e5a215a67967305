// The first half of the feed-forward block: silu(gate) * up.
#pragma once

#include "math.cuh"
#include "vectors.cuh"

namespace kccl::decode {

// Four features, of sums that are not yet times 1 / the root of the residual's mean square.
KCCL_DEVICE Quad act_of(const Quad& gate, const Quad& up, float inverse) {
    Quad act;
    KCCL_UNROLL
    for (int i = 0; i < 4; ++i) {
        act.value[i] = silu(gate.value[i] * inverse) * (up.value[i] * inverse);
    }
    return act;
}

// Finishes the rows of the product. Called by all warps that multiply, when they have met.
template <class S>
KCCL_DEVICE void finish_gate_up(Worker<S>& worker, uint32_t layer) {
    using M = typename Shape<S>::GateUp;
    const Cut tiles = M::tiles_of(worker.member());
    const float inverse = inverse_rms(worker);
    // Half of a tile's rows are features.
    constexpr uint32_t kQuads = kTileQuads / 2;
    for (uint32_t k = 0; k < ceil_div(M::kMostTiles * kQuads, Shape<S>::kConsumers); ++k) {
        const uint32_t quad = own_quad(worker, k);
        if (quad >= tiles.num * kQuads) break;
        const Quad gate = total_of(worker, quad / kQuads, quad % kQuads);
        const Quad up = total_of(worker, quad / kQuads, quad % kQuads + kQuads);
        const Quad act = act_of(gate, up, inverse);
        const uint32_t feature = tiles.first * kQuads + quad;
        const uint32_t lane = worker.first_lane() + feature / Places<S>::kFfnQuads;
        worker.publish(Places<S>::act(layer, lane) + feature % Places<S>::kFfnQuads, act);
    }
    worker.end_op();
}

}  // namespace kccl::decode
