// GGUF's Q4_0: blocks of 32 integers of 4 bits with one scale: weight = (integer - kZero) * scale.
// The twin of formats/q4_0.py, which is the format in Python.
#pragma once

#include "blocks32.h"

namespace kccl::engine {

struct Q4_0 : Blocks32<4, 8, false, 0> {
    static constexpr const char* kName = "q4_0";
};

}  // namespace kccl::engine
