// Converts four FP8 numbers (e4m3) to FP16, by an instruction that NVIDIA's GPUs have since sm_89.
// Older GPUs do it by operations on bits (e4m3_exact.cuh, which also says what the names mean).
#pragma once

#include "device.cuh"

#if __CUDA_ARCH__ < 890
#include "e4m3_exact.cuh"
#else

namespace kccl::decode {

constexpr float kHalvesToE4m3 = 1;

KCCL_DECODE uint64_t halves_of_e4m3(uint32_t four) {
    uint32_t low, high;
    asm("{\n\t"
        ".reg .b16 a, b;\n\t"
        "mov.b32 {a, b}, %2;\n\t"
        "cvt.rn.f16x2.e4m3x2 %0, a;\n\t"
        "cvt.rn.f16x2.e4m3x2 %1, b;\n\t"
        "}"
        : "=r"(low), "=r"(high)
        : "r"(four));
    return uint64_t{high} << 32 | low;
}

}  // namespace kccl::decode
#endif
