// Where a product's vectors come from: a warp polls for its part, and stages it.
#pragma once

#include "math.cuh"
#include "product.cuh"

namespace kccl::decode {

// A row of the embedding, widened: quad `quad` of a token's.
template <class S>
KCCL_DEVICE Quad embedded(const Task& task, int32_t token, uint32_t quad) {
    const auto* rows = reinterpret_cast<const uint64_t*>(task.embedding);
    const uint64_t four = mem::load_plain(rows + uint64_t(token) * (S::kHidden / 4) + quad);
    Quad values;
    KCCL_UNROLL
    for (int i = 0; i < 4; ++i) {
        values.value[i] =
            Element<typename S::Weight>::widen({static_cast<uint16_t>(four >> 16 * i)});
    }
    return values;
}

// The first quad of the part of a vector that the warp multiplies. The last warps' parts may lie
// behind the vector's end.
template <class M, class S>
KCCL_DEVICE uint32_t first_quad(const Worker<S>& worker) {
    return worker.warp_index() * M::kQuads;
}

// Stages quad i of this warp's vector, in all of its copies.
template <class M, class S>
KCCL_DEVICE void stage(Worker<S>& worker, uint32_t i, const Quad& quad) {
    const StagedQuad staged = split<typename S::Weight>(quad);
    KCCL_UNROLL
    for (uint32_t copy = 0; copy < M::kCopies; ++copy) {
        worker.staged()[copy * M::kAllSteps * kTileQuads + i] = staged;
    }
}

// Quad `quad` of an array of floats that the host has written.
KCCL_DEVICE Quad load_quad(uint64_t array, uint64_t quad) {
    const auto lines = mem::load_plain(reinterpret_cast<const mem::Line*>(array) + quad);
    return platform::bit_cast<Quad>(lines);
}

// Leaves the sum of the squares of the warp's part of residual i.
template <class S, uint32_t N>
KCCL_DEVICE void store_squares(Worker<S>& worker, const Quad (&quads)[N], uint32_t i) {
    float squares = 0;
    KCCL_UNROLL
    for (uint32_t k = 0; k < N; ++k) {
        for (const float value : quads[k].value) squares += value * value;
    }
    squares = sum_of_warp(squares);
    if (leads(warp())) mem::store_plain(worker.squares(worker.warp_index()) + i, squares);
}

// Asks for the weights of a norm of this warp's part, which the cache may have lost since the last
// round. Called one op earlier.
template <class M, class S>
KCCL_DEVICE void prefetch_norm(Worker<S>& worker, uint32_t norm) {
    constexpr uint32_t kEach = ceil_div(M::kQuads, platform::kWarpSize);
    const uint64_t first = uint64_t{norm} * (S::kHidden / 4) + first_quad<M>(worker);
    KCCL_UNROLL
    for (uint32_t k = 0; k < kEach; ++k) {
        const uint32_t i = worker.thread() + k * platform::kWarpSize;
        if (i < M::kQuads && i % (kKcclLineBytes / sizeof(Quad)) == 0) {
            mem::prefetch(reinterpret_cast<const Quad*>(worker.task().norms) + first + i);
        }
    }
}

// Stages this warp's part of the residual, times the norm's weights: the residual after `module`,
// or, if that is negative, the token's embedding.
template <class M, class S>
KCCL_DEVICE void stage_residual(Worker<S>& worker, int32_t module, uint32_t norm, int32_t token) {
    constexpr uint32_t kEach = ceil_div(M::kQuads, platform::kWarpSize);
    const uint32_t first = first_quad<M>(worker);
    Quad weights[kEach], quads[kEach];
    uint32_t places[kEach], wanted = 0;
    const uint32_t base = Places<S>::residual(module < 0 ? 0 : module, worker.residual_index());
    KCCL_UNROLL
    for (uint32_t k = 0; k < kEach; ++k) {
        const uint32_t i = worker.thread() + k * platform::kWarpSize;
        const bool is_there = i < M::kQuads && first + i < M::kColumns / 4;
        wanted |= is_there ? 1u << k : 0;
        places[k] = is_there ? first + i : 0;
        weights[k] = load_quad(worker.task().norms, uint64_t{norm} * (S::kHidden / 4) + places[k]);
    }
    if (module < 0) {
        KCCL_UNROLL
        for (uint32_t k = 0; k < kEach; ++k) {
            quads[k] =
                (wanted >> k & 1u) != 0 ? embedded<S>(worker.task(), token, places[k]) : Quad{};
        }
    } else {
        KCCL_UNROLL
        for (uint32_t k = 0; k < kEach; ++k) places[k] += base;
        worker.template await<mem::Scope::kDevice>(places, wanted, tag_of(worker.round()), quads);
    }
    KCCL_UNROLL
    for (uint32_t k = 0; k < kEach; ++k) {
        const uint32_t i = worker.thread() + k * platform::kWarpSize;
        Quad scaled;
        KCCL_UNROLL
        for (int j = 0; j < 4; ++j) scaled.value[j] = quads[k].value[j] * weights[k].value[j];
        if (i < M::kQuads) stage<M>(worker, i, scaled);
    }
    store_squares(worker, quads, 0);
}

// 1 / the root of the mean square of residual i of squares().
template <class S>
KCCL_DEVICE float inverse_rms(Worker<S>& worker, uint32_t i = 0) {
    float squares = 0;
    KCCL_UNROLL
    for (uint32_t each = 0; each < S::kWarps; ++each) {
        squares += mem::load_plain(worker.squares(each) + i);
    }
    return reciprocal_root(squares * (1.0f / S::kHidden) + S::kNormEps);
}

// Stages this warp's part of each lane's vector; quad i of a lane is at place_of(lane) + i.
template <class M, class S, class PlaceOf>
KCCL_DEVICE void stage_lanes(Worker<S>& worker, PlaceOf place_of) {
    constexpr uint32_t kEach = ceil_div(M::kQuads * M::kLanes, platform::kWarpSize);
    const uint32_t first = first_quad<M>(worker);
    Quad quads[kEach];
    uint32_t places[kEach], wanted = 0;
    KCCL_UNROLL
    for (uint32_t k = 0; k < kEach; ++k) {
        const uint32_t at = worker.thread() + k * platform::kWarpSize;
        const uint32_t lane = at / M::kQuads, i = at % M::kQuads;
        const bool is_there = lane < M::kLanes && first + i < M::kColumns / 4;
        wanted |= is_there ? 1u << k : 0;
        places[k] = is_there ? place_of(worker.first_lane() + lane) + first + i : 0;
    }
    worker.template await<mem::Scope::kDevice>(places, wanted, tag_of(worker.round()), quads);
    KCCL_UNROLL
    for (uint32_t k = 0; k < kEach; ++k) {
        const uint32_t at = worker.thread() + k * platform::kWarpSize;
        if (at < M::kQuads * M::kLanes) stage<M>(worker, at, quads[k]);
    }
}

}  // namespace kccl::decode
