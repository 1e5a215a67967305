// Integers of 8 bits with a scale for a group of columns, and with a zero point if it HAS_ZEROS.
// The twin of formats/int8.py.
//
// FP16 holds each integer less its zero point exactly. Stored integers without zero points have a
// sign. Packed ones have none: they are 128 larger.
#pragma once

#include "groups.cuh"
#include "integers.cuh"

namespace kccl::decode {

template <bool HAS_SIGN>
struct Int8Numbers : Integers {
    static constexpr uint32_t kBits = 8, kFlips = HAS_SIGN ? 0x80 : 0, kZero = 0x80;
    KCCL_CONSTEXPR static uint32_t placed(uint32_t bits, uint32_t i) { return bits << 8 * i; }

    template <class Unit>
    KCCL_DECODE static typename Unit::Weights operand(
        const typename Unit::template Packed<8>& stored, uint32_t zeros) {
        constexpr uint32_t kNum = sizeof(stored) / sizeof(uint32_t);
        uint64_t fours[kNum];
        KCCL_UNROLL
        for (uint32_t i = 0; i < kNum; ++i) fours[i] = halves_of_bytes(stored.word[i], zeros);
        return Unit::words_of(fours);
    }
};

template <uint32_t COLUMNS, uint32_t STRIP, bool HAS_ZEROS = false>
struct Int8 : Groups<Int8Numbers<!HAS_ZEROS>, float, HAS_ZEROS, COLUMNS, STRIP> {};

}  // namespace kccl::decode
