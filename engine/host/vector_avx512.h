// Vectors of 16 rows.
#pragma once

#include <immintrin.h>
#include <stdint.h>

namespace kccl::engine {
namespace {

struct Vector {
    using Floats = __m512;
    typedef uint32_t Words __attribute__((vector_size(64)));
    static constexpr int kWidth = 16;
    // 8 sums of two registers each, of 32 registers.
    static constexpr int kTile = 8;
    static constexpr int kTileColumns = 4;

    static Floats zero() { return _mm512_setzero_ps(); }
    static void load(const uint16_t* pair, Floats* even, Floats* odd) {
        Words both;
        __builtin_memcpy(&both, pair, sizeof(both));
        *even = (Floats)(both << 16);
        *odd = (Floats)(both & 0xffff0000);
    }
    static Floats fma(Floats weights, float x, Floats sum) {
        return _mm512_fmadd_ps(weights, _mm512_set1_ps(x), sum);
    }
    static Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
    static void store(float* to, Floats value) { _mm512_storeu_ps(to, value); }
};

}  // namespace
}  // namespace kccl::engine
