// GGUF's Q8_0: integers of 8 bits with a sign, and an FP16 scale for 32. The twin of
// formats/q8_0.py.
#pragma once

#include "int8.cuh"

namespace kccl::decode {

template <uint32_t COLUMNS, uint32_t STRIP>
struct Q80 : Groups<Int8Numbers<true>, f16, false, COLUMNS, STRIP> {};

}  // namespace kccl::decode
