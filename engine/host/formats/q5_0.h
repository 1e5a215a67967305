// GGUF's Q5_0: blocks of 32 integers of 5 bits with one scale: weight = (integer - kZero) * scale.
// The twin of formats/q5_0.py, which is the format in Python.
#pragma once

#include "blocks32.h"

namespace kccl::engine {

struct Q5_0 : Blocks32<5, 16, false, 0> {
    static constexpr const char* kName = "q5_0";
};

}  // namespace kccl::engine
