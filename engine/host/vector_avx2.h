// Vectors of 8 rows: half a panel.
#pragma once

#include <immintrin.h>
#include <stdint.h>

namespace kccl::engine {
namespace {

struct Vector {
    using Floats = __m256;
    typedef uint32_t Words __attribute__((vector_size(32)));
    static constexpr int kWidth = 8;
    // 4 sums of two registers each, of 16 registers.
    static constexpr int kTile = 4;
    static constexpr int kTileColumns = 2;

    static Floats zero() { return _mm256_setzero_ps(); }
    static void load(const uint16_t* pair, Floats* even, Floats* odd) {
        Words both;
        __builtin_memcpy(&both, pair, sizeof(both));
        *even = (Floats)(both << 16);
        *odd = (Floats)(both & 0xffff0000);
    }
    static Floats fma(Floats weights, float x, Floats sum) {
        return _mm256_fmadd_ps(weights, _mm256_set1_ps(x), sum);
    }
    static Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
    static void store(float* to, Floats value) { _mm256_storeu_ps(to, value); }
};

}  // namespace
}  // namespace kccl::engine
