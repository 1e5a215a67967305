// Integers of 4 bits with a scale for a group of columns, and with a zero point if there is one.
// The twin of formats/int4.py, which is the format in Python.
#pragma once

#include "integer_groups.h"

namespace kccl::engine {

template <uint32_t COLUMNS>
struct Int4 : IntegerGroups<COLUMNS, 4, 8, false, 0> {
    static constexpr const char* kName = COLUMNS == 128  ? "int4_128"
                                         : COLUMNS == 64 ? "int4_64"
                                                         : "int4_32";
};

template <uint32_t COLUMNS>
struct Int4Zeros : IntegerGroups<COLUMNS, 4, 8, true, 0> {
    static constexpr const char* kName = COLUMNS == 128  ? "int4_zeros_128"
                                         : COLUMNS == 64 ? "int4_zeros_64"
                                                         : "int4_zeros_32";
};

using Int4By128 = Int4<128>;
using Int4By64 = Int4<64>;
using Int4By32 = Int4<32>;
using Int4ZerosBy128 = Int4Zeros<128>;
using Int4ZerosBy64 = Int4Zeros<64>;
using Int4ZerosBy32 = Int4Zeros<32>;

}  // namespace kccl::engine
