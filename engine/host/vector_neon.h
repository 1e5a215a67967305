// Vectors of 4 rows, a quarter of a panel, for aarch64: every such CPU has NEON. BFDOT and BFMMLA
// are not used, because they add the products of two columns at once, round otherwise and drop
// subnormal numbers. So the bits would differ from those of the other instruction sets.
#pragma once

#include <arm_neon.h>
#include <stdint.h>

namespace kccl::engine {
namespace {

struct Vector {
    using Floats = float32x4_t;
    typedef uint32_t Words __attribute__((vector_size(16)));
    static constexpr int kWidth = 4;
    // 8 sums of two registers each take 16 of the 32 registers.
    static constexpr int kTile = 8;
    static constexpr int kTileColumns = 4;

    static Floats zero() { return vdupq_n_f32(0); }
    static Words words(const uint8_t* from) {
        Words loaded;
        __builtin_memcpy(&loaded, from, sizeof(loaded));
        return loaded;
    }
    static Floats floats(Words bits) { return (Floats)bits; }
    // Loads the FP16 numbers of kWidth rows as FP32 numbers.
    static Floats halves(const uint8_t* from) {
        float16x4_t four;
        __builtin_memcpy(&four, from, sizeof(four));
        return vcvt_f32_f16(four);
    }
    // Loads the integers of kWidth rows, a byte each, as FP32 numbers.
    template <class Byte>
    static Floats bytes(const Byte* from) {
        const float rows[] = {static_cast<float>(from[0]), static_cast<float>(from[1]),
                              static_cast<float>(from[2]), static_cast<float>(from[3])};
        return vld1q_f32(rows);
    }
    // Loads a byte of each of kWidth rows, each into a word of 32 bits.
    static Words byte_words(const uint8_t* from) {
        typedef uint8_t Bytes __attribute__((vector_size(4)));
        Bytes four;
        __builtin_memcpy(&four, from, sizeof(four));
        return __builtin_convertvector(four, Words);
    }
    static Floats fma(Floats weights, float x, Floats sum) { return vfmaq_n_f32(sum, weights, x); }
    static Floats add_product(Floats a, Floats b, Floats sum) { return vfmaq_f32(sum, a, b); }
    static Floats times(Floats a, float x) { return vmulq_n_f32(a, x); }
    static Floats add(Floats a, Floats b) { return vaddq_f32(a, b); }
    static void store(float* to, Floats value) { vst1q_f32(to, value); }
};

}  // namespace
}  // namespace kccl::engine
