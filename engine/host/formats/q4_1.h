// GGUF's Q4_1: blocks of 32 integers of 4 bits with one scale and one minimum: weight = integer *
// scale + minimum. The twin of formats/q4_1.py, which is the format in Python.
#pragma once

#include "blocks32.h"

namespace kccl::engine {

struct Q4_1 : Blocks32<4, 0, true, 0> {
    static constexpr const char* kName = "q4_1";
};

}  // namespace kccl::engine
