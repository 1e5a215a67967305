// FP16 numbers, one at a time.
#pragma once

namespace kccl::decode {

// Returns the products of two pairs of FP16 numbers, rounded to FP16.
KCCL_DECODE uint32_t times_pair(uint32_t a, uint32_t b) {
    uint32_t product = 0;
    KCCL_UNROLL
    for (uint32_t i = 0; i < 2; ++i) {
        const float one = Element<f16>::widen({static_cast<uint16_t>(a >> 16 * i)});
        const float other = Element<f16>::widen({static_cast<uint16_t>(b >> 16 * i)});
        product |= uint32_t{Element<f16>::narrow(one * other).bits} << 16 * i;
    }
    return product;
}

// Returns a word's bytes 0 and 2 as the upper bytes of its halves, whose lower bytes are 0.
KCCL_DECODE uint32_t even_bytes_up(uint32_t word) { return (word & 0x00ff00ff) << 8; }

}  // namespace kccl::decode
