// GGUF's Q8_0: blocks of 32 integers of 8 bits with a scale. The twin of formats/q8_0.py.
#pragma once

#include "blocks32.h"

namespace kccl::engine {

// A panel has the integers plus 128.
struct Q8_0 : Blocks32<8, 128, false, 128> {
    static constexpr const char* kName = "q8_0";
};

}  // namespace kccl::engine
