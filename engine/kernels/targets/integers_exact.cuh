// Integers as FP16, one at a time.
#pragma once

namespace kccl::decode {

KCCL_DECODE uint64_t halves_of_bytes(uint32_t four, uint32_t zeros) {
    uint64_t halves = 0;
    KCCL_UNROLL
    for (uint32_t i = 0; i < 4; ++i) {
        const float number = Integers::number(four >> 8 * i & 0xff, zeros >> i / 2 * 8 & 0xff);
        halves |= uint64_t{Element<f16>::narrow(number).bits} << 16 * i;
    }
    return halves;
}

KCCL_DECODE uint64_t halves_of_nibbles(uint32_t eight, uint32_t i, uint32_t zeros) {
    uint32_t four = 0;
    KCCL_UNROLL
    for (uint32_t k = 0; k < 4; ++k) four |= (eight >> bit_of_nibble(4 * i + k) & 0xf) << 8 * k;
    return halves_of_bytes(four, zeros);
}

template <uint32_t ZERO>
KCCL_DECODE uint64_t halves_of_sixes(uint32_t eight, uint32_t upper, uint32_t i) {
    uint32_t four = 0;
    KCCL_UNROLL
    for (uint32_t k = 0; k < 4; ++k) {
        const uint32_t number = 4 * i + k;
        const uint32_t lower = eight >> bit_of_nibble(number) & 0xf;
        four |= (lower | (upper >> bit_of_upper(number) & 3) << 4) << 8 * k;
    }
    return halves_of_bytes(four, ZERO * 0x101);
}

}  // namespace kccl::decode
