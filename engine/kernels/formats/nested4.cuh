// Integers of 4 bits, with a scale and a minimum for 32 columns, in blocks of
// GGUF: formats/nested.py.
#pragma once

#include "nested.cuh"

namespace kccl::decode {

template <uint32_t COLUMNS, uint32_t STRIP>
struct Nested4 : Nested<4, 0, 32, COLUMNS, STRIP> {};

}  // namespace kccl::decode
