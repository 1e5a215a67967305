// GGUF's Q5_1: blocks of 32 integers of 5 bits with one scale and one minimum: weight = integer *
// scale + minimum. The twin of formats/q5_1.py, which is the format in Python.
#pragma once

#include "blocks32.h"

namespace kccl::engine {

struct Q5_1 : Blocks32<5, 0, true, 0> {
    static constexpr const char* kName = "q5_1";
};

}  // namespace kccl::engine
