// Integers of 8 bits with a scale for a group of columns, and with a zero point if there is one.
// The twin of formats/int8.py, which is the format in Python.
#pragma once

#include "integer_groups.h"

namespace kccl::engine {

// Stored integers have a sign. A panel has them plus 128.
template <uint32_t COLUMNS>
struct Int8 : IntegerGroups<COLUMNS, 8, 128, false, 128> {
    static constexpr const char* kName = COLUMNS == 128 ? "int8_128" : "int8_32";
};

// Stored integers and zero points have no sign.
template <uint32_t COLUMNS>
struct Int8Zeros : IntegerGroups<COLUMNS, 8, 128, true, 0> {
    static constexpr const char* kName = COLUMNS == 128 ? "int8_zeros_128" : "int8_zeros_32";
};

using Int8By128 = Int8<128>;
using Int8By32 = Int8<32>;
using Int8ZerosBy128 = Int8Zeros<128>;
using Int8ZerosBy32 = Int8Zeros<32>;

}  // namespace kccl::engine
