// Vectors of 16 rows, a whole panel, for CPUs with AVX-512.
#pragma once

#include <immintrin.h>
#include <stdint.h>

namespace kccl::engine {
namespace {

struct Vector {
    using Floats = __m512;
    typedef uint32_t Words __attribute__((vector_size(64)));
    static constexpr int kWidth = 16;
    // 8 sums of two registers each take 16 of the 32 registers.
    static constexpr int kTile = 8;
    static constexpr int kTileColumns = 4;

    static Floats zero() { return _mm512_setzero_ps(); }
    static Words words(const uint8_t* from) {
        Words loaded;
        __builtin_memcpy(&loaded, from, sizeof(loaded));
        return loaded;
    }
    static Floats floats(Words bits) { return (Floats)bits; }
    // Loads the FP16 numbers of kWidth rows as FP32 numbers.
    static Floats halves(const uint8_t* from) {
        const __m256i bits = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from));
        return _mm512_maskz_cvtph_ps(0xffff, bits);
    }
    // Loads the integers of kWidth rows, a byte each, as FP32 numbers.
    static Floats bytes(const uint8_t* from) {
        return numbers(_mm512_maskz_cvtepu8_epi32(0xffff, sixteen(from)));
    }
    static Floats bytes(const int8_t* from) {
        return numbers(_mm512_maskz_cvtepi8_epi32(0xffff, sixteen(from)));
    }
    // Loads a byte of each of kWidth rows, each into a word of 32 bits.
    static Words byte_words(const uint8_t* from) {
        return (Words)_mm512_maskz_cvtepu8_epi32(0xffff, sixteen(from));
    }
    // Does what rows_of_e4m3() says: returns e4m3 numbers divided by 256. Extending the sign fills
    // the bits above the exponent with copies of it. All of these are cleared but the highest.
    static Floats e4m3(const uint8_t* from) {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
        const __m256i shifted = _mm256_slli_epi16(_mm256_cvtepi8_epi16(bytes), 7);
        const auto mask = static_cast<int16_t>(0xbfff);
        const __m256i halves = _mm256_and_si256(shifted, _mm256_set1_epi16(mask));
        return _mm512_maskz_cvtph_ps(0xffff, halves);
    }
    static Floats fma(Floats weights, float x, Floats sum) {
        return _mm512_fmadd_ps(weights, _mm512_set1_ps(x), sum);
    }
    static Floats add_product(Floats a, Floats b, Floats sum) { return _mm512_fmadd_ps(a, b, sum); }
    static Floats times(Floats a, float x) { return _mm512_mul_ps(a, _mm512_set1_ps(x)); }
    static Floats add(Floats a, Floats b) { return _mm512_add_ps(a, b); }
    static void store(float* to, Floats value) { _mm512_storeu_ps(to, value); }

  private:
    static Floats numbers(__m512i integers) { return _mm512_maskz_cvtepi32_ps(0xffff, integers); }
    static __m128i sixteen(const void* from) {
        return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
    }
};

}  // namespace
}  // namespace kccl::engine
