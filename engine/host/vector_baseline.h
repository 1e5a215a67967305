// Vectors of 16 rows on any CPU. The compiler turns them into the instructions that the CPU has.
#pragma once

#include <stdint.h>

namespace kccl::engine {
namespace {

struct Vector {
    struct Floats {
        float row[16];
    };
    struct Words {
        uint32_t row[16];
    };
    static constexpr int kWidth = 16;
    static constexpr int kTile = 2;
    static constexpr int kTileColumns = 2;

    static Floats zero() { return {}; }
    static Words words(const uint8_t* from) {
        Words loaded;
        __builtin_memcpy(&loaded, from, sizeof(loaded));
        return loaded;
    }
    static Floats floats(const Words& bits) {
        Floats value;
        __builtin_memcpy(&value, &bits, sizeof(value));
        return value;
    }
    // Loads the FP16 bits of kWidth rows, each into a word of 32 bits.
    static Words half_words(const uint8_t* from) {
        uint16_t bits[kWidth];
        __builtin_memcpy(&bits, from, sizeof(bits));
        Words words;
        for (int i = 0; i < kWidth; ++i) words.row[i] = bits[i];
        return words;
    }
    // Loads the integers of kWidth rows, a byte each, as FP32 numbers.
    template <class Byte>
    static Floats bytes(const Byte* from) {
        Floats rows;
        for (int i = 0; i < kWidth; ++i) rows.row[i] = static_cast<float>(from[i]);
        return rows;
    }
    static Words byte_words(const uint8_t* from) {
        Words words;
        for (int i = 0; i < kWidth; ++i) words.row[i] = from[i];
        return words;
    }
    static Floats fma(Floats weights, float x, Floats sum) {
        for (int i = 0; i < kWidth; ++i) {
            sum.row[i] = __builtin_fmaf(weights.row[i], x, sum.row[i]);
        }
        return sum;
    }
    static Floats add_product(Floats a, Floats b, Floats sum) {
        for (int i = 0; i < kWidth; ++i) {
            sum.row[i] = __builtin_fmaf(a.row[i], b.row[i], sum.row[i]);
        }
        return sum;
    }
    static Floats times(Floats a, float x) {
        for (float& row : a.row) row *= x;
        return a;
    }
    static Floats add(Floats a, Floats b) {
        for (int i = 0; i < kWidth; ++i) a.row[i] += b.row[i];
        return a;
    }
    static void store(float* to, Floats value) { __builtin_memcpy(to, &value, sizeof(value)); }
};

#define KCCL_ENGINE_OPERATOR(op)                                                  \
    inline Vector::Words operator op(Vector::Words a, uint32_t b) {               \
        for (uint32_t& word : a.row) word = word op b;                            \
        return a;                                                                 \
    }                                                                             \
    inline Vector::Words operator op(Vector::Words a, const Vector::Words& b) {   \
        for (int i = 0; i < Vector::kWidth; ++i) a.row[i] = a.row[i] op b.row[i]; \
        return a;                                                                 \
    }
KCCL_ENGINE_OPERATOR(<<)
KCCL_ENGINE_OPERATOR(>>)
KCCL_ENGINE_OPERATOR(&)
KCCL_ENGINE_OPERATOR(|)
KCCL_ENGINE_OPERATOR(+)
KCCL_ENGINE_OPERATOR(*)
#undef KCCL_ENGINE_OPERATOR

}  // namespace
}  // namespace kccl::engine
