// Two FP16 numbers at a time on NVIDIA GPUs. halves_exact.cuh says what the name means.
#pragma once

namespace kccl::decode {

KCCL_DECODE uint32_t times_pair(uint32_t a, uint32_t b) {
    uint32_t product;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}

// This takes one instruction. Compilers make two of shifts and masks.
KCCL_DECODE uint32_t even_bytes_up(uint32_t word) { return __byte_perm(word, 0, 0x2404); }

}  // namespace kccl::decode
