// GGUF's Q4_K: blocks of 256 integers of 4 bits, with a scale and a minimum for each 32
// (k_blocks.h). The twin of formats/q4_k.py, which is the format in Python.
#pragma once

#include "k_blocks.h"

namespace kccl::engine {

struct StoredQ4K : PackedScales {
    static constexpr uint32_t kBits = 4;
    static constexpr uint32_t kIntegersAt = kPackedAt + kPackedBytes;
    static constexpr uint32_t kBytes = kIntegersAt + 128;

    // Returns the four integers of a quad (planes.h). 32 bytes hold two blocks of 32: one in their
    // lower 4 bits, the next in the upper ones.
    static uint32_t quad(const uint8_t* from, uint32_t block, uint32_t quad) {
        return word_at(from + kIntegersAt + block / 2 * 32 + 4 * quad) >> block % 2 * 4 & kFours;
    }
};

struct Q4K : KBlocks<StoredQ4K> {
    static constexpr const char* kName = "q4_k";
};

}  // namespace kccl::engine
