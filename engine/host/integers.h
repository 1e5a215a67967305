// Sums up products of unsigned weights of 8 bits with the digits of a vector (digits.h), in the
// instruction set that the compiler's flags name. A register holds the weights of four columns (a
// quad) of each of Vector::kWidth rows. All sums are exact. The sum over a group of 32 columns is
// upper * 256 + lower, where upper belongs to the two higher digits.
//
// add(sum, words, digits, quad, nth) adds a quad's products. nth counts the calls for a sum of 32
// or 16 columns from 0 on.
#pragma once

#include <algorithm>
#include <iterator>

#include "digits.h"
#include "products.h"
#include "vector.h"

namespace kccl::engine {
namespace {

#if defined(__AVX2__)

// Stores the digits as [place][column], a signed byte each.
inline void place_bytes(const int32_t* biased, uint8_t* digits) {
    for (uint32_t place = 0; place < 3; ++place) {
        for (uint32_t i = 0; i < kDigitGroup; ++i) {
            digits[place * kDigitGroup + i] =
                static_cast<uint8_t>((biased[i] >> 8 * place & 255) ^ 128);
        }
    }
}

#endif

#if defined(__AVX512VNNI__)

struct Integers {
    using Words = __m512i;
    typedef uint16_t Shorts __attribute__((vector_size(64)));
    struct Sum {
        __m512i of[3];
    };

    static void place(const int32_t* biased, uint8_t* digits) { place_bytes(biased, digits); }
    static Sum start(const int32_t* places) {
        return {_mm512_set1_epi32(places[0]), _mm512_set1_epi32(places[1]),
                _mm512_set1_epi32(places[2])};
    }
    static Words words(const uint8_t* from) { return _mm512_loadu_si512(from); }
    static Words low(Words words) { return _mm512_and_si512(words, _mm512_set1_epi8(15)); }
    static Words high(Words words) { return low((Words)((Shorts)words >> 4)); }
    // Sets the bits of `mask` in each byte to those of `from`, which lie `up` bits below them.
    static Words with_bits(Words words, Words from, int up, int mask) {
        const auto moved = (Words)(up < 0 ? (Shorts)from >> -up : (Shorts)from << up);
        const Words wanted = _mm512_set1_epi8(static_cast<char>(mask));
        return _mm512_or_si512(words, _mm512_and_si512(moved, wanted));
    }
    // Replaces each byte of `places` by the byte with that number of a table of 16 bytes.
    static Words looked_up(Words places, const uint8_t* table) {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
        return _mm512_shuffle_epi8(_mm512_maskz_broadcast_i32x4(0xffff, bytes), places);
    }
    static void add(Sum* sum, Words words, const DigitGroup& x, int quad, int) {
        KCCL_ENGINE_UNROLL
        for (int place = 0; place < 3; ++place) {
            int32_t four;
            memcpy(&four, x.digits + place * kDigitGroup + 4 * quad, sizeof(four));
            sum->of[place] = _mm512_dpbusd_epi32(sum->of[place], words, _mm512_set1_epi32(four));
        }
    }
    static Vector::Floats upper(const Sum& sum) {
        return floats((Integers32)sum.of[2] * 256 + (Integers32)sum.of[1]);
    }
    static Vector::Floats lower(const Sum& sum) { return floats((Integers32)sum.of[0]); }

  private:
    typedef int32_t Integers32 __attribute__((vector_size(64)));
    static Vector::Floats floats(Integers32 integers) {
        typedef float Floats32 __attribute__((vector_size(64)));
        return (Vector::Floats) __builtin_convertvector(integers, Floats32);
    }
};

#else

// Without an instruction that adds four products of bytes (VNNI), the two higher digits are joined
// into one of 16 bits.
inline int16_t upper_digit(int32_t biased) {
    return static_cast<int16_t>((biased >> 8) - (kDigitBias >> 8));
}
inline int16_t lower_digit(int32_t biased) {
    return static_cast<int16_t>((biased & 255) - (kDigitBias & 255));
}

#if defined(__AVX2__)

#if defined(__AVX512F__)
#define KCCL_ENGINE_M(name) _mm512_##name
#define KCCL_ENGINE_M_ALL(name) _mm512_##name##_si512
#define KCCL_ENGINE_M_REPEATED(bytes) _mm512_maskz_broadcast_i32x4(0xffff, bytes)
using IntegerWords = __m512i;
#else
#define KCCL_ENGINE_M(name) _mm256_##name
#define KCCL_ENGINE_M_ALL(name) _mm256_##name##_si256
#define KCCL_ENGINE_M_REPEATED(bytes) _mm256_broadcastsi128_si256(bytes)
using IntegerWords = __m256i;
#endif

struct Integers {
    using Words = IntegerWords;
    typedef uint16_t Shorts __attribute__((vector_size(sizeof(Words))));
    typedef int32_t Integers32 __attribute__((vector_size(sizeof(Words))));
    typedef float Floats32 __attribute__((vector_size(sizeof(Words))));
    struct Sum {
        Words upper, lower;
    };

    // Stores the digits as [upper, lower][even, odd columns][quad][2].
    static void place(const int32_t* biased, uint8_t* digits) {
        int16_t of[2][2][kDigitGroup / 2];
        for (uint32_t i = 0; i < kDigitGroup; ++i) {
            of[0][i % 2][i / 2] = upper_digit(biased[i]);
            of[1][i % 2][i / 2] = lower_digit(biased[i]);
        }
        memcpy(digits, of, sizeof(of));
    }
    static Sum start(const int32_t* places) {
        return {all(places[2] * 256 + places[1]), all(places[0])};
    }
    static Words words(const uint8_t* from) {
        Words loaded;
        memcpy(&loaded, from, sizeof(loaded));
        return loaded;
    }
    static Words low(Words words) {
        return KCCL_ENGINE_M_ALL (and)(words, KCCL_ENGINE_M(set1_epi8)(15));
    }
    static Words high(Words words) { return low((Words)((Shorts)words >> 4)); }
    // Sets the bits of `mask` in each byte to those of `from`, as the version for VNNI does.
    static Words with_bits(Words words, Words from, int up, int mask) {
        const auto moved = (Words)(up < 0 ? (Shorts)from >> -up : (Shorts)from << up);
        const Words wanted = KCCL_ENGINE_M(set1_epi8)(static_cast<char>(mask));
        return KCCL_ENGINE_M_ALL(or)(words, KCCL_ENGINE_M_ALL (and)(moved, wanted));
    }
    // Looks each byte up in a table of 16 bytes, as the version for VNNI does.
    static Words looked_up(Words places, const uint8_t* table) {
        const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
        return KCCL_ENGINE_M(shuffle_epi8)(KCCL_ENGINE_M_REPEATED(bytes), places);
    }
    static void add(Sum* sum, Words words, const DigitGroup& x, int quad, int) {
        const Words even = KCCL_ENGINE_M_ALL (and)(words, KCCL_ENGINE_M(set1_epi16)(255));
        const Words odd = (Words)((Shorts)words >> 8);
        sum->upper = plus(sum->upper, even, x, quad);
        sum->upper = plus(sum->upper, odd, x, 8 + quad);
        sum->lower = plus(sum->lower, even, x, 16 + quad);
        sum->lower = plus(sum->lower, odd, x, 24 + quad);
    }
    static Vector::Floats upper(const Sum& sum) { return floats(sum.upper); }
    static Vector::Floats lower(const Sum& sum) { return floats(sum.lower); }

  protected:
    static Vector::Floats floats(Words integers) {
        return (Vector::Floats) __builtin_convertvector((Integers32)integers, Floats32);
    }
    static Words all(int32_t value) { return KCCL_ENGINE_M(set1_epi32)(value); }

  private:
    static Words plus(Words sum, Words pairs, const DigitGroup& x, int word) {
        int32_t two;
        memcpy(&two, x.digits + 4 * word, sizeof(two));
        const Words products = KCCL_ENGINE_M(madd_epi16)(pairs, all(two));
        return KCCL_ENGINE_M(add_epi32)(sum, products);
    }
};

// Does the same for weights that are at most MOST, 63 or less. Then two products of a weight and a
// digit fit into 16 bits, and one instruction makes them for four columns. Their sums stay in 16
// bits for kTogether quads, and then become 32 bits.
template <int MOST>
struct ShortIntegers : Integers {
    static constexpr int kFit = 32767 / (2 * 128 * MOST);
    static constexpr int kTogether = kFit >= 8 ? 8 : kFit >= 4 ? 4 : 2;
    static_assert(kFit >= kTogether, "the sums fit into 16 bits");
    struct Sum {
        Words of[3], shorts[3];
    };

    static void place(const int32_t* biased, uint8_t* digits) { place_bytes(biased, digits); }
    static Sum start(const int32_t* places) {
        return {{all(places[0]), all(places[1]), all(places[2])}, {}};
    }
    static void add(Sum* sum, Words words, const DigitGroup& x, int quad, int nth) {
        KCCL_ENGINE_UNROLL
        for (int place = 0; place < 3; ++place) {
            int32_t four;
            memcpy(&four, x.digits + place * kDigitGroup + 4 * quad, sizeof(four));
            const Words products = KCCL_ENGINE_M(maddubs_epi16)(words, all(four));
            Words* const shorts = sum->shorts + place;
            const bool is_first = nth % kTogether == 0;
            *shorts = is_first ? products : KCCL_ENGINE_M(add_epi16)(*shorts, products);
            if ((nth + 1) % kTogether != 0) continue;
            const Words pairs = KCCL_ENGINE_M(madd_epi16)(*shorts, KCCL_ENGINE_M(set1_epi16)(1));
            sum->of[place] = KCCL_ENGINE_M(add_epi32)(sum->of[place], pairs);
        }
    }
    static Vector::Floats upper(const Sum& sum) {
        return floats((Words)((Integers32)sum.of[2] * 256 + (Integers32)sum.of[1]));
    }
    static Vector::Floats lower(const Sum& sum) { return floats(sum.of[0]); }
};

#undef KCCL_ENGINE_M
#undef KCCL_ENGINE_M_ALL
#undef KCCL_ENGINE_M_REPEATED

#else

struct Integers {
    struct Words {
        uint8_t of[4 * Vector::kWidth];
    };
    struct Sum {
        int32_t upper[Vector::kWidth], lower[Vector::kWidth];
    };

    static void place(const int32_t* biased, uint8_t* digits) {
        int16_t of[2][kDigitGroup];
        for (uint32_t i = 0; i < kDigitGroup; ++i) {
            of[0][i] = upper_digit(biased[i]);
            of[1][i] = lower_digit(biased[i]);
        }
        memcpy(digits, of, sizeof(of));
    }
    static Sum start(const int32_t* places) {
        Sum sum;
        for (int32_t& each : sum.upper) each = places[2] * 256 + places[1];
        for (int32_t& each : sum.lower) each = places[0];
        return sum;
    }
    static Words words(const uint8_t* from) {
        Words loaded;
        memcpy(&loaded, from, sizeof(loaded));
        return loaded;
    }
    static Words low(Words words) {
        for (uint8_t& each : words.of) each &= 15;
        return words;
    }
    static Words high(Words words) {
        for (uint8_t& each : words.of) each >>= 4;
        return words;
    }
    // Sets the bits of `mask` in each byte to those of `from`, as the version for VNNI does.
    static Words with_bits(Words words, const Words& from, int up, int mask) {
        for (int i = 0; i < 4 * Vector::kWidth; ++i) {
            words.of[i] |= (up < 0 ? from.of[i] >> -up : from.of[i] << up) & mask;
        }
        return words;
    }
    // Looks each byte up in a table of 16 bytes, as the version for VNNI does.
    static Words looked_up(Words places, const uint8_t* table) {
#if defined(__aarch64__)
        static_assert(sizeof(Words) == sizeof(uint8x16_t));
        vst1q_u8(places.of, vqtbl1q_u8(vld1q_u8(table), vld1q_u8(places.of)));
#else
        for (uint8_t& each : places.of) each = table[each];
#endif
        return places;
    }
    static void add(Sum* sum, const Words& words, const DigitGroup& x, int quad, int) {
        int16_t upper[4], lower[4];
        memcpy(upper, x.digits + 8 * quad, sizeof(upper));
        memcpy(lower, x.digits + 2 * kDigitGroup + 8 * quad, sizeof(lower));
        for (int row = 0; row < Vector::kWidth; ++row) {
            for (int k = 0; k < 4; ++k) {
                sum->upper[row] += words.of[4 * row + k] * upper[k];
                sum->lower[row] += words.of[4 * row + k] * lower[k];
            }
        }
    }
    static Vector::Floats upper(const Sum& sum) { return floats(sum.upper); }
    static Vector::Floats lower(const Sum& sum) { return floats(sum.lower); }

  private:
    static Vector::Floats floats(const int32_t* integers) {
        float rows[Vector::kWidth];
        for (int row = 0; row < Vector::kWidth; ++row)
            rows[row] = static_cast<float>(integers[row]);
        Vector::Floats value;
        memcpy(&value, rows, sizeof(value));
        return value;
    }
};

#endif
#endif

// Returns the largest integer that a panel of format F has.
template <class F>
constexpr int most_of() {
    if constexpr (requires { F::kIntegers; }) {
        return *std::max_element(std::begin(F::kIntegers), std::end(F::kIntegers));
    } else {
        return (1 << F::kBits) - 1;
    }
}

#if defined(__AVX2__) && !defined(__AVX512VNNI__)
template <int MOST, bool IS_SHORT = (MOST < 64)>
struct IntegersUpTo : ShortIntegers<MOST> {};
template <int MOST>
struct IntegersUpTo<MOST, false> : Integers {};
#else
template <int MOST>
using IntegersUpTo = Integers;
#endif

// What sums up the products of format F.
template <class F>
using IntegersOf = IntegersUpTo<most_of<F>()>;

}  // namespace
}  // namespace kccl::engine
