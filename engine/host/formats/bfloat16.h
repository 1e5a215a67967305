// BF16: the upper half of FP32's bits. The twin of formats/bfloat16.py, which is the format in
// Python.
#pragma once

#include "pairs16.h"

namespace kccl::engine {

struct Bfloat16 : Pairs16 {
    static constexpr const char* kName = "bfloat16";

    // Loads a pair of columns as FP32 numbers. A word (Vector::Words) holds, for each row, the even
    // column's value in its lower half, and the odd column's in its upper half.
    template <class Vector>
    static void load(const uint8_t* piece, uint32_t, typename Vector::Floats* even,
                     typename Vector::Floats* odd) {
        const typename Vector::Words both = Vector::words(piece);
        *even = Vector::floats(both << 16);
        *odd = Vector::floats(both & 0xffff0000);
    }

    static void widen(const uint8_t* stored, uint32_t num, float* out) {
        for (uint32_t i = 0; i < num; ++i) {
            uint16_t bits;
            memcpy(&bits, stored + stored_bytes(i), sizeof(bits));
            const uint32_t word = uint32_t{bits} << 16;
            memcpy(out + i, &word, sizeof(word));
        }
    }
};

}  // namespace kccl::engine
