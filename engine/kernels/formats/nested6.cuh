// Integers of 6 bits, with a scale for 16 columns and a minimum for 32, in blocks of
// GGUF: formats/nested.py.
#pragma once

#include "nested.cuh"

namespace kccl::decode {

template <uint32_t COLUMNS, uint32_t STRIP>
struct Nested6 : Nested<6, 32, 16, COLUMNS, STRIP> {};

}  // namespace kccl::decode
