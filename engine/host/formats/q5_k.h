// GGUF's Q5_K: blocks of 256 integers of 5 bits, with a scale and a minimum for each 32
// (k_blocks.h). The twin of formats/q5_k.py, which is the format in Python.
#pragma once

#include "k_blocks.h"

namespace kccl::engine {

struct StoredQ5K : PackedScales {
    static constexpr uint32_t kBits = 5;
    static constexpr uint32_t kFifthsAt = kPackedAt + kPackedBytes;
    static constexpr uint32_t kIntegersAt = kFifthsAt + 32;
    static constexpr uint32_t kBytes = kIntegersAt + 128;

    // Returns the four integers of a quad (planes.h). Their lower 4 bits lie as those of Q4_K. Byte
    // i of the fifth bits has those of column i of all blocks of 32.
    static uint32_t quad(const uint8_t* from, uint32_t block, uint32_t quad) {
        const uint32_t lower =
            word_at(from + kIntegersAt + block / 2 * 32 + 4 * quad) >> block % 2 * 4 & kFours;
        return lower | (word_at(from + kFifthsAt + 4 * quad) >> block & kOnes) << 4;
    }
};

struct Q5K : KBlocks<StoredQ5K> {
    static constexpr const char* kName = "q5_k";
};

}  // namespace kccl::engine
