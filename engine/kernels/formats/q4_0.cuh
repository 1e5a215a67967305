// GGUF's Q4_0: integers of 4 bits less 8, and an FP16 scale for 32. The twin of formats/q4_0.py.
#pragma once

#include "int4.cuh"

namespace kccl::decode {

template <uint32_t COLUMNS, uint32_t STRIP>
struct Q40 : Groups<Int4Numbers, f16, false, COLUMNS, STRIP> {};

}  // namespace kccl::decode
