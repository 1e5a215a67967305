// FP16: IEEE 754's binary16. The twin of formats/float16.py.
#pragma once

#include "pairs16.h"

namespace kccl::engine {

struct Float16 : Pairs16 {
    static constexpr const char* kName = "float16";

    // Bfloat16::load() says what a word holds.
    template <class Vector>
    static void load(const uint8_t* piece, uint32_t, typename Vector::Floats* even,
                     typename Vector::Floats* odd) {
        const typename Vector::Words both = Vector::words(piece);
        *even = widened<Vector>(both & 0xffff);
        *odd = widened<Vector>(both >> 16);
    }

    static void widen(const uint8_t* stored, uint32_t num, float* out) {
        for (uint32_t i = 0; i < num; ++i) {
            uint16_t bits;
            memcpy(&bits, stored + stored_bytes(i), sizeof(bits));
            out[i] = number(bits);
        }
    }

    // Returns the FP32 numbers of a vector's rows, which lie one after another.
    template <class Vector>
    static typename Vector::Floats rows(const uint8_t* from) {
        if constexpr (requires { Vector::halves(from); }) {
            return Vector::halves(from);
        } else {
            return widened<Vector>(Vector::half_words(from));
        }
    }

    // Returns the FP32 number of FP16 bits.
    static float number(uint32_t bits) { return widened<One>(bits); }

    // Returns the FP32 numbers of words with FP16 bits.
    //
    // The exponent's bias grows by 112. The bits of a subnormal number get an exponent as if a
    // leading 1 stood before them, and that 1 is subtracted again. Both steps are exact, and no
    // FP32 number on the way is subnormal, which would be slow. Weights are finite.
    template <class Vector>
    static typename Vector::Floats widened(const typename Vector::Words& halves) {
        const auto magnitude = halves & 0x7fff;
        const auto sign = (halves & 0x8000) << 16;
        const auto is_small = (magnitude + 0xfffffc00) >> 31;
        const auto bits = (magnitude << 13) + (is_small << 23) + (sign | 112u << 23);
        const auto leading = is_small * (113u << 23) | sign;
        return Vector::fma(Vector::floats(leading), -1.0f, Vector::floats(bits));
    }

  private:
    // Converts a vector of one row.
    struct One {
        using Words = uint32_t;
        using Floats = float;
        static float floats(uint32_t word) {
            float value;
            memcpy(&value, &word, sizeof(value));
            return value;
        }
        static float fma(float weight, float x, float sum) { return weight * x + sum; }
    };
};

}  // namespace kccl::engine
