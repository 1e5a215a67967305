// Integers of 4 bits with a scale for a group of columns, and with a zero point if it HAS_ZEROS;
// without one it is 8. The twin of formats/int4.py.
//
// FP16 holds each integer less its zero point exactly.
#pragma once

#include "groups.cuh"
#include "integers.cuh"

namespace kccl::decode {

struct Int4Numbers : Integers {
    static constexpr uint32_t kBits = 4, kFlips = 0, kZero = 8;
    KCCL_CONSTEXPR static uint32_t placed(uint32_t bits, uint32_t i) {
        return bits << bit_of_nibble(i);
    }

    template <class Unit>
    KCCL_DECODE static typename Unit::Weights operand(
        const typename Unit::template Packed<4>& stored, uint32_t zeros) {
        constexpr uint32_t kNum = sizeof(stored) / sizeof(uint32_t);
        uint64_t fours[2 * kNum];
        KCCL_UNROLL
        for (uint32_t i = 0; i < 2 * kNum; ++i) {
            fours[i] = halves_of_nibbles(stored.word[i / 2], i % 2, zeros);
        }
        return Unit::words_of(fours);
    }
};

template <uint32_t COLUMNS, uint32_t STRIP, bool HAS_ZEROS = false>
struct Int4 : Groups<Int4Numbers, float, HAS_ZEROS, COLUMNS, STRIP> {};

}  // namespace kccl::decode
