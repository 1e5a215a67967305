// The first half of the feed-forward block: silu(gate) * up.
#pragma once

#include "biases.cuh"
#include "math.cuh"

namespace kccl::decode {

// Four features, of sums that are not yet times 1 / the root of the residual's mean square. tile,
// i: of the row tile, among the rank's, and of the gate's quads in it.
template <class S>
KCCL_DEVICE Quad act_of(const Task& task, uint32_t layer, uint32_t tile, uint32_t i,
                        const Quad& gate_sums, const Quad& up_sums, float inverse) {
    const uint32_t quad = tile * kTileQuads + i;
    const Quad gate = scaled<S>(task, Product<S>::kGateUp, layer, quad, gate_sums, inverse);
    const Quad up =
        scaled<S>(task, Product<S>::kGateUp, layer, quad + kTileQuads / 2, up_sums, inverse);
    Quad act;
    KCCL_UNROLL
    for (int j = 0; j < 4; ++j) act.value[j] = silu(gate.value[j]) * up.value[j];
    return act;
}

// Finishes the rows of the product. Called by all warps that multiply, when they have met.
template <class S>
KCCL_DEVICE void finish_acts(Worker<S>& worker, uint32_t layer) {
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
        const Quad act = act_of<S>(worker.task(), layer, tiles.first + quad / kQuads, quad % kQuads,
                                   gate, up, inverse);
        const uint32_t feature = tiles.first * kQuads + quad;
        const uint32_t lane = worker.first_lane() + feature / Places<S>::kFfnQuads;
        worker.publish(Places<S>::act(layer, lane) + feature % Places<S>::kFfnQuads, act);
    }
    worker.end_op();
}

}  // namespace kccl::decode
