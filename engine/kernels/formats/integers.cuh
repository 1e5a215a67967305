// Integers of 8 or 4 bits as FP16, less their zero points.
#pragma once

#include "../device.cuh"

namespace kccl::decode {

// Where number i of eight of 4 bits lies in their word: the order in which targets can take two at
// a time.
KCCL_CONSTEXPR uint32_t bit_of_nibble(uint32_t i) { return i / 2 * 4 + i % 2 * 16; }

// Where the upper two bits of number i of eight of 6 bits lie in their 16 bits.
KCCL_CONSTEXPR uint32_t bit_of_upper(uint32_t i) { return i / 2 * 2 + i % 2 * 8; }

// What integers of all sizes share, for groups.cuh.
struct Integers {
    static constexpr float kScaleFactor = 1;
    KCCL_DECODE static float number(uint32_t bits, uint32_t zero) {
        return static_cast<float>(static_cast<int32_t>(bits) - static_cast<int32_t>(zero));
    }
};

}  // namespace kccl::decode

// halves_of_bytes(four, zeros)
//                 four integers of 8 bits
// halves_of_nibbles(eight, i, zeros)
//                 numbers 4 i to 4 i + 3 of eight integers of 4 bits
// halves_of_sixes<ZERO>(eight, upper, i)
//                 numbers 4 i to 4 i + 3 of eight integers of 6 bits, with one zero point. upper:
//                 their upper bits, in the lower half of the word
//
// Each returns four numbers of 16 bits. zeros: two bytes, the zero points of the first and of the
// last two; those of numbers of 4 bits are less than 64.
#if defined(KCCL_TARGET_CUDA)
#include "../targets/integers_cuda.cuh"
#else
#include "../targets/integers_exact.cuh"
#endif
