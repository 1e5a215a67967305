// FP8 e4m3fn with a scale for a group of columns. The twin of formats/e4m3.py, which is the format
// in Python.
//
// A number has a sign, 4 bits of exponent with a bias of 7, and 3 of mantissa. With FP16's bias of
// 15 the same bits mean a number that is 256 times smaller, exactly. So a panel's weights are
// multiplied as these smaller numbers, and its scales are 256 times larger.
#pragma once

#include "groups.h"

namespace kccl::engine {

namespace {

// Returns the FP16 bits of an e4m3 number divided by 256. The number must be finite. Each
// instruction set has its own code of this function.
template <class Words>
inline Words half_of_e4m3(const Words& bits) {
    return ((bits & 0x80) << 8) | ((bits & 0x7f) << 7);
}

}  // namespace

// Loads the e4m3 numbers of a vector of rows, and returns them divided by 256. Their bytes lie one
// after another from `from` on.
template <class Vector>
inline typename Vector::Floats rows_of_e4m3(const uint8_t* from) {
    if constexpr (requires { Vector::e4m3(from); }) {
        return Vector::e4m3(from);
    } else {
        return Float16::widened<Vector>(half_of_e4m3(Vector::byte_words(from)));
    }
}

// A piece of a panel holds the weights' bytes, [column][row], then the scales, [row].
template <uint32_t COLUMNS>
struct E4m3 : Groups<COLUMNS, 8, false> {
    using Base = Groups<COLUMNS, 8, false>;
    static constexpr bool kIsInteger = false;
    static constexpr const char* kName = COLUMNS == 128 ? "e4m3_128" : "e4m3_32";

    static void pack(uint8_t* panel, const uint8_t* rows, uint32_t num_rows, uint32_t num_columns) {
        Base::each_group(panel, rows, num_rows, num_columns,
                         [](uint8_t* piece, uint32_t row, const uint8_t* group) {
                             for (uint32_t i = 0; i < COLUMNS; ++i) {
                                 piece[i * Base::kRows + row] = group[Base::kWeightsAt + i];
                             }
                             Base::put_scale(piece, row, Base::scale_of(group) * 256);
                         });
    }

    static void widen(const uint8_t* stored, uint32_t num, float* out) {
        for (uint32_t i = 0; i < num; ++i) {
            const uint8_t* group = stored + uint64_t{i / COLUMNS} * Base::kStoredBytes;
            const uint32_t byte = group[Base::kWeightsAt + i % COLUMNS];
            out[i] = Float16::number(half_of_e4m3(byte)) * 256 * Base::scale_of(group);
        }
    }
};

using E4m3By128 = E4m3<128>;
using E4m3By32 = E4m3<32>;

}  // namespace kccl::engine
