// MXFP4: floats of 4 bits, e2m1, and a power of two, e8m0, as the scale of 32. The twin of
// formats/mxfp4.py.
//
// FP16 holds each float exactly. The exponent and the mantissa of e2m1 in the place of FP16's
// lowest exponent bits and highest mantissa bit make 2^-14 times the float, subnormal ones too.
// Scales make up for that: packed ones are 2^14 times as large.
#pragma once

#include "groups.cuh"
#include "integers.cuh"

#if defined(KCCL_TARGET_CUDA)
#include "../targets/halves_cuda.cuh"
#else
#include "../targets/halves_exact.cuh"
#endif

namespace kccl::decode {

struct E8m0 {
    uint8_t bits;

    // Returns a stored scale in FP32. The smallest one is subnormal.
    KCCL_DECODE static float number(uint8_t bits) {
        return platform::bit_cast<float>(bits != 0 ? uint32_t{bits} << 23 : 1u << 22);
    }
    // Returns the bits of a packed scale. Scales of 2^114 and more, whose weights would be beyond
    // 10^34, become 2^113.
    KCCL_CONSTEXPR static uint8_t packed(uint8_t bits) {
        constexpr uint32_t kFactor = 14, kMost = 254;
        return static_cast<uint8_t>(bits + kFactor < kMost ? bits + kFactor : kMost);
    }
};

// Returns a packed scale in FP32. 0 is that of zeros behind a row's last column.
KCCL_DECODE float widened(E8m0 scale) {
    return platform::bit_cast<float>(uint32_t{scale.bits} << 23);
}

// A packed word has eight numbers, and each of its halves has one of each pair. In a half, the bits
// of pair 2 lie where FP16 has them, and those of pair 3 take the bits between them. Pairs 0 and 1
// lie eight bits lower, as bit_of_nibble() has them. So pairs 2 and 0 take one and two
// instructions. Pairs 3 and 1 take four together, which move their bits to the upper bits of bytes,
// and one each.
struct E2m1Numbers {
    static constexpr uint32_t kBits = 4, kFlips = 0, kZero = 0;
    // E8m0::packed() has a factor of its own.
    static constexpr float kScaleFactor = 1;

    // Returns the bits of a packed word that number i, of four bits, has there.
    KCCL_CONSTEXPR static uint32_t placed(uint32_t four, uint32_t i) {
        const uint32_t sign = four >> 3, rest = four & 7;
        return (sign << sign_at(i / 2) | rest << rest_at(i / 2)) << i % 2 * 16;
    }

    KCCL_DECODE static float number(uint32_t bits, uint32_t) {
        constexpr float kValues[] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
        const float value = kValues[bits & 7];
        return (bits & 8) != 0 ? -value : value;
    }

    template <class Unit>
    KCCL_DECODE static typename Unit::Weights operand(
        const typename Unit::template Packed<4>& stored, uint32_t) {
        uint64_t fours[2 * sizeof(stored) / sizeof(uint32_t)];
        expand(stored, fours);
        return Unit::words_of(fours);
    }

    // Returns 2^-14 times the numbers, in `fours`: what Unit::words_of() takes.
    template <class PACKED, uint32_t NUM>
    KCCL_DECODE static void expand(const PACKED& stored, uint64_t (&fours)[NUM]) {
        KCCL_UNROLL
        for (uint32_t i = 0; i < NUM / 2; ++i) {
            const uint32_t word = stored.word[i];
            const uint32_t odd = (word << 7 & kSigns) | (word >> 3 & kRests);
            fours[2 * i] = word << 8 & kUpper & (kSigns | kRests);
            fours[2 * i] |= uint64_t{even_bytes_up(odd)} << 32;
            fours[2 * i + 1] = word & kUpper & (kSigns | kRests);
            fours[2 * i + 1] |= uint64_t{odd & kUpper} << 32;
        }
    }

  private:
    // Where a pair's sign lies in each half of a word, and the lowest of its other three bits. FP16
    // has them at 15 and 9.
    KCCL_CONSTEXPR static uint32_t sign_at(uint32_t pair) {
        return (pair % 2 == 0 ? 7 : 0) + pair / 2 * 8;
    }
    KCCL_CONSTEXPR static uint32_t rest_at(uint32_t pair) {
        return (pair % 2 == 0 ? 1 : 4) + pair / 2 * 8;
    }

    // In each byte, and the upper bytes: the bits of FP16's sign, and of its three others.
    static constexpr uint32_t kSigns = 0x80808080, kRests = 0x0e0e0e0e, kUpper = 0xff00ff00;
};

template <uint32_t COLUMNS, uint32_t STRIP>
struct Mxfp4 : Groups<E2m1Numbers, E8m0, false, COLUMNS, STRIP> {
    using Base = Groups<E2m1Numbers, E8m0, false, COLUMNS, STRIP>;
    // The words of a thread's part of a tile. On AMD's GPUs two threads share one.
    static constexpr uint32_t kWords = sizeof(typename Base::Stored) / sizeof(uint32_t);
    static constexpr bool kIsTwin =
        STRIP == 2 && sizeof(typename Base::Unit::template Packed<2 * Base::kBits>) ==
                          2 * sizeof(typename Base::Stored);

    KCCL_DECODE static void pack(uint8_t* tile, const uint8_t* rows, uint64_t row, uint64_t first,
                                 uint64_t columns, uint32_t num) {
        if constexpr (kIsTwin) {
            // A strip has whole groups, so the first one of two tiles begins with a group.
            const auto twin = static_cast<uint32_t>(first / kTileColumns % 2);
            auto* const strip = reinterpret_cast<uint32_t*>(tile - twin * Base::kTileBytes);
            Base::pack_words(rows, row, first, columns, num, [&](uint32_t at, uint32_t word) {
                mem::store_plain(strip + (at / kWords * 2 + twin) * kWords + at % kWords, word);
            });
        } else {
            Base::pack(tile, rows, row, first, columns, num);
        }
    }
};

template <uint32_t COLUMNS, uint32_t STRIP>
constexpr bool kHasTwins<Mxfp4<COLUMNS, STRIP>> = Mxfp4<COLUMNS, STRIP>::kIsTwin;

}  // namespace kccl::decode
