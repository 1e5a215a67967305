// What the host must know to read the stamps of a kernel that traces.
#pragma once

#include "stream.cuh"

namespace kccl::decode {

// Numbers of describe_trace() that come before those of stages.
constexpr uint32_t kTraceNumbers = 7;

// Behind these numbers come the stages of a round with a head, [block][stage], a word each. Its low
// kProductAt bits are the stage's bytes, and the bits above are 1 + its Product. A word is zero if
// the block has no such stage. Each block writes its own words.
constexpr uint32_t kProductAt = 32;

template <class S>
KCCL_DEVICE void describe_trace(uint64_t* out) {
    if (!leads(block())) return;
    using T = Trace<S>;
    const uint32_t mine = platform::block_in_grid();
    if (mine == 0) {
        out[0] = T::kOps;
        out[1] = kNumStamps;
        out[2] = T::kStages;
        out[3] = kNumStageStamps;
        out[4] = T::kOfRound;
        out[5] = num_stages<S>();
        out[6] = Shape<S>::kGroups;
    }
    uint64_t* const stages = out + kTraceNumbers + uint64_t{mine} * T::kStages;
    uint32_t num = 0;
    for_each_stage<S>(mine, true, [&](uint32_t num_bytes, Product<S> product, bool) {
        stages[num++] = (static_cast<uint64_t>(product) + 1) << kProductAt | num_bytes;
        return true;
    });
    for (; num < T::kStages; ++num) stages[num] = 0;
}

}  // namespace kccl::decode
