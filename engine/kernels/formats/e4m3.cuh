// FP8 e4m3fn with a scale for a group of columns. The twin of formats/e4m3.py.
//
// A number has a sign, 4 bits of exponent and 3 of mantissa. FP16 holds all of them exactly, and
// NVIDIA's GPUs convert two in one instruction. BF16 would take four. The vectors' range does not
// suffer: WideF16 in mma.cuh.
#pragma once

#include "groups.cuh"

#if defined(KCCL_TARGET_CUDA)
#include "../targets/e4m3_cuda.cuh"
#else
#include "../targets/e4m3_exact.cuh"
#endif

namespace kccl::decode {

struct E4m3Numbers {
    static constexpr uint32_t kBits = 8, kFlips = 0, kZero = 0;
    static constexpr float kScaleFactor = kHalvesToE4m3;
    KCCL_CONSTEXPR static uint32_t placed(uint32_t bits, uint32_t i) { return bits << 8 * i; }

    template <class Unit>
    KCCL_DECODE static typename Unit::Weights operand(
        const typename Unit::template Packed<8>& stored, uint32_t) {
        constexpr uint32_t kNum = sizeof(stored) / sizeof(uint32_t);
        uint64_t fours[kNum];
        KCCL_UNROLL
        for (uint32_t i = 0; i < kNum; ++i) fours[i] = halves_of_e4m3(stored.word[i]);
        return Unit::words_of(fours);
    }
    KCCL_DECODE static float number(uint32_t bits, uint32_t) {
        return Element<f8e4m3>::widen({static_cast<uint8_t>(bits)});
    }
};

template <uint32_t COLUMNS, uint32_t STRIP>
struct E4m3 : Groups<E4m3Numbers, float, false, COLUMNS, STRIP> {};

}  // namespace kccl::decode
