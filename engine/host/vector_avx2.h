// Vectors of 8 rows, half a panel, for CPUs with AVX2.
#pragma once

#include <immintrin.h>
#include <stdint.h>

namespace kccl::engine {
namespace {

struct Vector {
    using Floats = __m256;
    typedef uint32_t Words __attribute__((vector_size(32)));
    static constexpr int kWidth = 8;
    // 4 sums of two registers each take 8 of the 16 registers.
    static constexpr int kTile = 4;
    static constexpr int kTileColumns = 2;

    static Floats zero() { return _mm256_setzero_ps(); }
    static Words words(const uint8_t* from) {
        Words loaded;
        __builtin_memcpy(&loaded, from, sizeof(loaded));
        return loaded;
    }
    static Floats floats(Words bits) { return (Floats)bits; }
    // Loads the FP16 numbers of kWidth rows, which lie one after another, as FP32 numbers.
    static Floats halves(const uint8_t* from) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
    }
    // Converts FP16 numbers, whose bits are the lower half of each word. The upper halves are zero.
    static Floats halves(Words bits) {
        const __m256i packed = _mm256_packus_epi32((__m256i)bits, (__m256i)bits);
        const __m256i first = _mm256_permute4x64_epi64(packed, 0b1000);
        return _mm256_cvtph_ps(_mm256_castsi256_si128(first));
    }
    // Loads the integers of kWidth rows, a byte each, as FP32 numbers.
    static Floats bytes(const uint8_t* from) {
        return _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(eight(from)));
    }
    static Floats bytes(const int8_t* from) {
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(eight(from)));
    }
    // Loads a byte of each of kWidth rows, each into a word of 32 bits.
    static Words byte_words(const uint8_t* from) {
        return (Words)_mm256_cvtepu8_epi32(eight(from));
    }
    // Does what rows_of_e4m3() says: returns e4m3 numbers divided by 256. Extending the sign fills
    // the bits above the exponent with copies of it. All of these are cleared but the highest.
    static Floats e4m3(const uint8_t* from) {
        const __m128i shifted = _mm_slli_epi16(_mm_cvtepi8_epi16(eight(from)), 7);
        const auto mask = static_cast<int16_t>(0xbfff);
        return _mm256_cvtph_ps(_mm_and_si128(shifted, _mm_set1_epi16(mask)));
    }
    static Floats fma(Floats weights, float x, Floats sum) {
        return _mm256_fmadd_ps(weights, _mm256_set1_ps(x), sum);
    }
    static Floats add_product(Floats a, Floats b, Floats sum) { return _mm256_fmadd_ps(a, b, sum); }
    static Floats times(Floats a, float x) { return _mm256_mul_ps(a, _mm256_set1_ps(x)); }
    static Floats add(Floats a, Floats b) { return _mm256_add_ps(a, b); }
    static void store(float* to, Floats value) { _mm256_storeu_ps(to, value); }

  private:
    static __m128i eight(const void* from) {
        return _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
    }
};

}  // namespace
}  // namespace kccl::engine
