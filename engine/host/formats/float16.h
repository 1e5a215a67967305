// FP16: IEEE 754's binary16. The twin of formats/float16.py, which is the format in Python.
#pragma once

#include "pairs16.h"

namespace kccl::engine {

struct Float16 : Pairs16 {
    static constexpr const char* kName = "float16";

    // Loads a pair of columns as FP32 numbers. Each word holds the even column's value in its lower
    // half, and the odd column's in its upper half.
    template <class Vector>
    static void load(const uint8_t* piece, uint32_t, typename Vector::Floats* even,
                     typename Vector::Floats* odd) {
        const typename Vector::Words both = Vector::words(piece);
        *even = converted<Vector>(both & 0xffff);
        *odd = converted<Vector>(both >> 16);
    }

    static void widen(const uint8_t* stored, uint32_t num, float* out) {
        for (uint32_t i = 0; i < num; ++i) {
            uint16_t bits;
            memcpy(&bits, stored + stored_bytes(i), sizeof(bits));
            out[i] = number(bits);
        }
    }

    // Loads the FP16 numbers of a vector of rows, which lie one after another, as FP32 numbers.
    template <class Vector>
    static typename Vector::Floats rows(const uint8_t* from) {
        if constexpr (requires { Vector::halves(from); }) {
            return Vector::halves(from);
        } else {
            return widened<Vector>(Vector::half_words(from));
        }
    }

    // Converts the bits of an FP16 number to FP32.
    static float number(uint32_t bits) { return widened<One>(bits); }

    // Converts FP16 numbers to FP32. Each word holds the bits of one of them.
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
    template <class Vector>
    static typename Vector::Floats converted(const typename Vector::Words& halves) {
        if constexpr (requires { Vector::halves(halves); }) {
            return Vector::halves(halves);
        } else {
            return widened<Vector>(halves);
        }
    }

    // A vector of one row, so that widened() converts a single number.
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
