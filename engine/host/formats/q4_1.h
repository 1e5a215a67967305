// GGUF's Q4_1: blocks of 32 integers of 4 bits with a scale and a minimum. The twin of
// formats/q4_1.py.
#pragma once

#include "blocks32.h"

namespace kccl::engine {

struct Q4_1 : Blocks32<4, 0, true, 0> {
    static constexpr const char* kName = "q4_1";
};

}  // namespace kccl::engine
