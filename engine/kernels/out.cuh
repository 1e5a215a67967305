// The projection of what attention gives, where its vector comes in parts, one for each split of
// the strands (not S::kMergesFirst): each warp merges them for the columns that it multiplies.
#pragma once

#include "parts.cuh"
#include "vectors.cuh"

namespace kccl::decode {

// Stages this warp's part of each lane's vector. Several threads share a quad's splits, so that a
// thread loads few.
template <class M, class S>
KCCL_DEVICE void stage_parts(Worker<S>& worker, uint32_t layer) {
    using Dims = Shape<S>;
    constexpr uint32_t kTotal = M::kQuads * M::kLanes;
    constexpr uint32_t sharers = [] {
        uint32_t n = 1;
        while (n < S::kSplits && 2 * n * kTotal <= platform::kWarpSize) n *= 2;
        return n;
    }();
    constexpr uint32_t kMine = S::kSplits / sharers;
    constexpr uint32_t kAtOnce = platform::kWarpSize / sharers;
    const uint32_t sharer = worker.thread() % sharers;
    const uint32_t first = first_quad<M>(worker);
    for (uint32_t start = 0; start < kTotal; start += kAtOnce) {
        const uint32_t at = start + worker.thread() / sharers;
        const uint32_t lane = at / M::kQuads, column = first + at % M::kQuads;
        const bool is_there = lane < M::kLanes && column < M::kColumns / 4;
        const uint32_t head = is_there ? column / Dims::kHeadQuads : 0;
        const uint32_t base = is_there ? Places<S>::part(layer, worker.first_lane() + lane, head) +
                                             sharer * Dims::kPartQuads
                                       : 0;
        uint32_t places[2 * kMine];
        Quad quads[2 * kMine];
        KCCL_UNROLL
        for (uint32_t i = 0; i < kMine; ++i) {
            const uint32_t part = base + i * sharers * Dims::kPartQuads;
            places[2 * i] = part + column % Dims::kHeadQuads;
            places[2 * i + 1] = part + Dims::kHeadQuads;
        }
        worker.template await<mem::Scope::kDevice>(places, is_there ? ~0u : 0,
                                                   tag_of(worker.round()), quads);
        Part parts[kMine];
        KCCL_UNROLL
        for (uint32_t i = 0; i < kMine; ++i) {
            parts[i] = {quads[2 * i], quads[2 * i + 1].value[0], quads[2 * i + 1].value[1]};
        }
        const Part whole = merge_shared<sharers>(merge_all<kMine>(parts), worker.thread());
        const Quad quad = is_there ? attended_by(whole) : Quad{};
        if (sharer == 0 && at < kTotal) stage<M>(worker, at, quad);
    }
}

}  // namespace kccl::decode
