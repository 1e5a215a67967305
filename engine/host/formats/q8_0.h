// GGUF's Q8_0: blocks of 32 integers of 8 bits with one scale: weight = (integer - kZero) * scale.
// The twin of formats/q8_0.py, which is the format in Python.
#pragma once

#include "blocks32.h"

namespace kccl::engine {

// Stored integers have a sign. A panel has them plus 128.
struct Q8_0 : Blocks32<8, 128, false, 128> {
    static constexpr const char* kName = "q8_0";
};

}  // namespace kccl::engine
