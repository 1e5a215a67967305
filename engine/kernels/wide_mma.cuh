// How four warps multiply together: a row tile for each warp, times up to 128 vectors, which lie in
// shared memory. Each warp's weights are in its registers, in the form that Mma has them. So are
// its sums. They have the same products as Mma's, in the same places of the matrix unit, so they
// have the same bits.
//
// A product ends later. So a warp may load its next weights while the unit computes, and no warp
// loads a vector. No kernel uses it yet.
//
// VECTORS is 32, 64 or 128. T is Mma's.
//
//   WideMma<T, VECTORS>::kIsThere   whether the target has this unit. If not, this is all
//   kWarps                          how many neighbouring warps call everything together. The first
//                                   one's number in the block is a multiple of it
//   kStepBytes                      the bytes of a step: 16 elements of all vectors, in the wide
//                                   form, which wide_word_at() describes
//   Sums                            of[g] are the Mma<T>::Sums of vectors 4g to 4g + 3
//   WideMma<T, VECTORS> unit        what each thread has of the unit
//   unit.begin()                    called before multiply(), behind all that has written to the
//                                   weights or the sums that it takes
//   unit.multiply(sums, weights, step, adds)
//                                   starts to add the products of the warp's tile with a step in
//                                   shared memory, aligned to 128 bytes. If not adds, sums begin at
//                                   zero, whatever they were. All warps pass the same step and
//                                   adds. Products with the same sums run in order
//   unit.commit()                   ends a group: what was started since the group before
//   unit.wait<PENDING>()            waits until all groups but the last PENDING have ended. The
//                                   weights' registers and this warp's use of the steps end then,
//                                   and not before: until then weights must not change
//   unit.wait(sums)                 waits for all groups. Sums are read or written behind it only.
//                                   Called once for each Sums that the groups have computed
//
// Asynchronous copies and this unit see shared memory through the same proxy. So behind a copy's
// CopyBarrier nothing is needed. Who stores a step by ordinary stores calls mem::fence_copies()
// behind them, before the sync behind which the warps multiply.
#pragma once

#include "mma.cuh"

namespace kccl::decode {

// How many vectors lie together: their step is kWideGroupBytes, and those of neighbouring groups
// lie behind each other. So the first vectors' step is the beginning of the step of all.
constexpr uint32_t kWideVectors = 4;
constexpr uint32_t kWideGroupBytes = kWideVectors * kTileFloat4s * sizeof(StagedFloat4);

// Where a word of a staged vector lies in a step, counted in words: high[pair] or low[pair] of
// float4 `index4` of four. The unit takes 16 bytes at a time, of one column, which is the high or
// the low part of a vector. These are the pairs of the same number, so that thread q's operands of
// Mma, from float4 q, and those of this unit multiply the same columns of a tile.
KCCL_CONSTEXPR uint32_t wide_word_at(uint32_t vector, uint32_t index4, bool is_low, uint32_t pair) {
    constexpr uint32_t kColumn = kTileFloat4s, kVector = 2 * kColumn,
                       kHalf = kWideVectors * kVector;
    return vector / kWideVectors * (2 * kHalf) + pair * kHalf + vector % kWideVectors * kVector +
           (is_low ? kColumn : 0) + index4;
}

// Stores float4 `index4` of a vector in a step.
KCCL_DECODE void store_wide(uint32_t* step, uint32_t vector, uint32_t index4,
                            const StagedFloat4& staged) {
    KCCL_UNROLL
    for (uint32_t pair = 0; pair < 2; ++pair) {
        mem::store_plain(step + wide_word_at(vector, index4, false, pair), staged.high[pair]);
        mem::store_plain(step + wide_word_at(vector, index4, true, pair), staged.low[pair]);
    }
}

}  // namespace kccl::decode

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#include "targets/wide_mma_cuda.cuh"
#elif defined(KCCL_TARGET_CUDA) || defined(KCCL_TARGET_HIP)
#include "targets/wide_mma_none.cuh"
#else
#include "targets/wide_mma_loop.cuh"
#endif
