// Integers as FP16 on NVIDIA GPUs, two at a time. The bits of an integer in the mantissa of 1024
// make 1024 plus the integer.
#pragma once

namespace kccl::decode {

KCCL_DECODE uint64_t halves_of_bytes(uint32_t four, uint32_t zeros) {
    constexpr uint32_t kUpper = 0x64;  // the upper byte of 1024
    uint32_t first, last;
    asm("sub.rn.f16x2 %0, %1, %2;"
        : "=r"(first)
        : "r"(__byte_perm(four, kUpper, 0x4140)), "r"(__byte_perm(zeros, kUpper, 0x4040)));
    asm("sub.rn.f16x2 %0, %1, %2;"
        : "=r"(last)
        : "r"(__byte_perm(four, kUpper, 0x4342)), "r"(__byte_perm(zeros, kUpper, 0x4141)));
    return uint64_t{last} << 32 | first;
}

// The last two lie 4 bits further up, so they are 16 times as large: (1024 + 16 n) / 16 - 64 -
// zero.
KCCL_DECODE uint64_t halves_of_nibbles(uint32_t eight, uint32_t i, uint32_t zeros) {
    constexpr uint32_t kTwo = 0x00010001, k1024 = 0x6400, kMinus64 = 0xd400, k16th = 0x2c00;
    const uint32_t four = eight >> 8 * i;
    uint32_t first, last;
    // (four & mask) | 1024 in one instruction: compilers would take two.
    asm("{\n\t"
        ".reg .b32 n;\n\t"
        "lop3.b32 n, %1, %2, %3, 0xea;\n\t"
        "sub.rn.f16x2 %0, n, %4;\n\t"
        "}"
        : "=r"(first)
        : "r"(four), "r"(0xf * kTwo), "r"(k1024 * kTwo), "r"(((zeros & 0xff) + k1024) * kTwo));
    asm("{\n\t"
        ".reg .b32 n;\n\t"
        "lop3.b32 n, %1, %2, %3, 0xea;\n\t"
        "fma.rn.f16x2 %0, n, %4, %5;\n\t"
        "}"
        : "=r"(last)
        : "r"(four), "r"(0xf0 * kTwo), "r"(k1024 * kTwo), "r"(k16th * kTwo),
          "r"(((zeros >> 8) * 16 + kMinus64) * kTwo));
    return uint64_t{last} << 32 | first;
}

// As for nibbles. Bits 2 k and 2 k + 1 of each half of `uppers` belong to pair k.
template <uint32_t ZERO>
KCCL_DECODE uint64_t halves_of_sixes(uint32_t eight, uint32_t upper, uint32_t i) {
    constexpr uint32_t kTwo = 0x00010001, k1024 = 0x6400, kMinus64 = 0xd400, k16th = 0x2c00;
    static_assert(ZERO < 64, "FP16's numbers from 64 to 128 are 1/16 apart");
    const uint32_t four = eight >> 8 * i, uppers = __byte_perm(upper, 0, 0x4140) << 6 >> 4 * i;
    uint32_t first, last;
    const uint32_t low = (four & 0xf * kTwo) | (uppers >> 2 & 0x30 * kTwo) | k1024 * kTwo;
    const uint32_t high = (four & 0xf0 * kTwo) | (uppers & 0x300 * kTwo) | k1024 * kTwo;
    asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(first) : "r"(low), "r"((ZERO + k1024) * kTwo));
    asm("fma.rn.f16x2 %0, %1, %2, %3;"
        : "=r"(last)
        : "r"(high), "r"(k16th * kTwo), "r"((ZERO * 16 + kMinus64) * kTwo));
    return uint64_t{last} << 32 | first;
}

}  // namespace kccl::decode
