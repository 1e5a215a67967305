// Tells the host how the stamps of a kernel that traces lie in memory (trace.cuh).
#pragma once

#include "stream.cuh"

namespace kccl::decode {

// Writes KcclDecodeTraceSizes to *out and, behind it, each block's stages of weights,
// KcclDecodeStage [block][num_stages]. Called by all threads of a grid.
template <class S>
KCCL_DECODE void describe_trace(KcclDecodeTraceSizes* out) {
    if (!leads(block())) return;
    using T = Trace<S>;
    const uint32_t mine = platform::block_in_grid();
    if (mine == 0) {
        out->num_ops = T::kOps;
        out->num_stages = T::kStages;
        out->of_token_step = T::kOfTokenStep;
        out->ring_stages = num_stages<S>();
        out->num_lane_groups = Shape<S>::kLaneGroups;
    }
    auto* const stages = reinterpret_cast<KcclDecodeStage*>(out + 1) + uint64_t{mine} * T::kStages;
    uint32_t num = 0;
    for_each_stage<S>(mine, true, [&](uint32_t num_bytes, Product<S> product, bool) {
        stages[num++] = {num_bytes, static_cast<uint32_t>(product) + 1};
        return true;
    });
    for (; num < T::kStages; ++num) stages[num] = {0, 0};
}

}  // namespace kccl::decode
