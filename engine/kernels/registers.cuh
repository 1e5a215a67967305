// Shares a block's registers among its warps. A multiprocessor of sm_90 has four parts; warp i is
// in part i % 4, and the warps of a part have equally many registers, unless they give some away.
#pragma once

#include "device.cuh"

namespace kccl::decode {

// Whether the kernel moves registers between its warps and, if so, how many a thread then has: in
// the `computing` warps, which come first in the block, and in the `others`, which need few.
struct RegisterPlan {
    bool moves;
    uint32_t of_computing;
    uint32_t of_others;
};

// How many registers a thread of the other warps keeps, unless a kernel asks for another number.
constexpr uint32_t kRegistersOfOthers = 56;

KCCL_CONSTEXPR RegisterPlan plan_registers(uint32_t computing, uint32_t others,
                                           uint32_t of_others) {
    constexpr uint32_t kParts = 4, kOfPart = 512, kMost = 255;
    const uint32_t warps = (computing + others) / kParts;  // in each part
    const bool are_whole = computing % kParts == 0 && others == kParts;
    if (!are_whole || kOfPart / warps >= kMost) return {false, 0, 0};
    const uint32_t each = kOfPart / warps / 8 * 8;
    if (each < of_others) return {false, 0, 0};
    return {true, (each * warps - of_others) / (warps - 1) / 8 * 8, of_others};
}

// Gives the calling warp its share of the registers, if the plan moves any. Called by all threads
// of the block. computes: whether the warp is one of the COMPUTING warps. OF_OTHERS: how many
// registers a thread of the other warps keeps.
template <uint32_t COMPUTING, uint32_t OTHERS, uint32_t OF_OTHERS = kRegistersOfOthers>
KCCL_DECODE void take_share(bool computes) {
    constexpr RegisterPlan kPlan = plan_registers(COMPUTING, OTHERS, OF_OTHERS);
    if constexpr (kPlan.moves) {
        if (computes) {
            mem::take_registers<kPlan.of_computing>();
        } else {
            mem::give_registers<kPlan.of_others>();
        }
    }
}

}  // namespace kccl::decode
