// GGUF's Q6_K: blocks of 256 integers of 6 bits, with a scale for each 16 (k_blocks.h). The twin of
// formats/q6_k.py, which is the format in Python.
#pragma once

#include "k_blocks.h"

namespace kccl::engine {

struct StoredQ6K {
    using Scale = int8_t;
    static constexpr uint32_t kColumns = 256;
    static constexpr uint32_t kBits = 6;
    static constexpr int32_t kZero = 32;
    static constexpr bool kHasMinimums = false;
    static constexpr uint32_t kScalesOfBlock = 2;
    static constexpr uint32_t kUpperAt = 128, kScalesAt = kUpperAt + 64;
    static constexpr uint32_t kFactorAt = kScalesAt + 16;
    static constexpr uint32_t kBytes = kFactorAt + 2;

    static uint16_t factor(const uint8_t* from, uint32_t) { return half_at(from + kFactorAt); }
    static uint8_t scale(const uint8_t* from, uint32_t block, uint32_t i) {
        return from[kScalesAt + 2 * block + i];
    }
    // Returns the four integers of a quad (planes.h). Four blocks of 32 have their lower 4 bits in
    // 64 bytes: two in the lower halves of these, then two in the upper ones. Their upper 2 bits
    // are in 32 bytes: a byte has those of one column.
    static uint32_t quad(const uint8_t* from, uint32_t block, uint32_t quad) {
        const uint32_t four = block / 4, within = block % 4;
        const uint32_t lower = word_at(from + four * 64 + within % 2 * 32 + 4 * quad);
        const uint32_t upper = word_at(from + kUpperAt + four * 32 + 4 * quad);
        return (lower >> within / 2 * 4 & kFours) | (upper >> 2 * within & kThrees) << 4;
    }
};

struct Q6K : KBlocks<StoredQ6K> {
    static constexpr const char* kName = "q6_k";
};

}  // namespace kccl::engine
