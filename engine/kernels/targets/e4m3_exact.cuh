// Converts four FP8 numbers (e4m3) to FP16, by operations on their bits. These move the bits of an
// e4m3 number to where FP16 has them. Because FP16's exponent has a bias of 15 and e4m3's one of 7,
// the result is the number divided by 256, exactly.
#pragma once

#include "device.cuh"

namespace kccl::decode {

// An e4m3 number is this factor times the result of halves_of_e4m3().
constexpr float kHalvesToE4m3 = 256;

// Converts the four numbers in `four`, the first in the lowest byte. Returns four FP16 numbers, the
// first in the lowest 16 bits.
KCCL_DECODE uint64_t halves_of_e4m3(uint32_t four) {
    uint64_t halves = 0;
    KCCL_UNROLL
    for (uint32_t i = 0; i < 4; ++i) {
        const uint32_t bits = four >> 8 * i;
        halves |= uint64_t{(bits & 0x80) << 8 | (bits & 0x7f) << 7} << 16 * i;
    }
    return halves;
}

}  // namespace kccl::decode
