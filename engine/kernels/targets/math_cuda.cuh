// Functions of math.cuh by the special function unit of NVIDIA's GPUs. A correctly rounded division
// or root has a branch for subnormal numbers, which takes as long as the rest.
#pragma once

namespace kccl::decode {

KCCL_DECODE float reciprocal(float x) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

KCCL_DECODE float reciprocal_root(float x) {
    float result;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

KCCL_DECODE float exponential2(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}

KCCL_DECODE float rounded_product(float a, float b) {
    float result;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}

KCCL_DECODE float times_plus(float a, float b, float c) {
    float result;
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(result) : "f"(a), "f"(b), "f"(c));
    return result;
}

KCCL_DECODE uint32_t most_of_warp(uint32_t word) { return __reduce_max_sync(0xffffffffu, word); }

KCCL_DECODE uint32_t num_bits(uint64_t word) { return static_cast<uint32_t>(__popcll(word)); }

}  // namespace kccl::decode
