// Four FP8 numbers as FP16, by operations on their bits. FP16's bias of 15 makes the bits of an
// e4m3 number one that is 256 times smaller, exactly.
#pragma once

#include "device.cuh"

namespace kccl::decode {

// An e4m3 number is so many times as large as what halves_of_e4m3() gives.
constexpr float kHalvesToE4m3 = 256;

// Returns four numbers of 16 bits.
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
