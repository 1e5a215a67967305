// GGUF's K formats with blocks of 64 columns, for lanes that end within a block of 256. A stored
// block has the factor and the least (k_blocks.h) of the block of which it is a quarter. The twin
// of formats/quarters.py.
#pragma once

#include "k_blocks.h"
#include "q4_k.h"
#include "q5_k.h"
#include "q6_k.h"

namespace kccl::engine {

// A stored block has the factor, the least if there are minimums, the scales, the minimums, and a
// byte for each integer. Whole: the struct of the format with blocks of 256.
template <class Whole>
struct StoredQuarter {
    using Scale = typename Whole::Scale;
    static constexpr uint32_t kColumns = 64;
    static constexpr uint32_t kBits = Whole::kBits;
    static constexpr int32_t kZero = Whole::kZero;
    static constexpr bool kHasMinimums = Whole::kHasMinimums;
    static constexpr uint32_t kScalesOfBlock = Whole::kScalesOfBlock;
    static constexpr uint32_t kScalesAt = (kHasMinimums ? 2 : 1) * sizeof(uint16_t);
    static constexpr uint32_t kMinimumsAt = kScalesAt + 2 * kScalesOfBlock;
    static constexpr uint32_t kIntegersAt = kMinimumsAt + (kHasMinimums ? 2 : 0);
    static constexpr uint32_t kBytes = kIntegersAt + kColumns;

    static uint16_t factor(const uint8_t* from, uint32_t k) {
        return half_at(from + k * sizeof(uint16_t)) ^ k << 15;
    }
    static uint8_t scale(const uint8_t* from, uint32_t block, uint32_t i) {
        return from[kScalesAt + block * kScalesOfBlock + i];
    }
    static uint8_t minimum(const uint8_t* from, uint32_t block) {
        return from[kMinimumsAt + block];
    }
    static uint32_t quad(const uint8_t* from, uint32_t block, uint32_t quad) {
        return word_at(from + kIntegersAt + 32 * block + 4 * quad);
    }
};

struct Q4K64 : KBlocks<StoredQuarter<StoredQ4K>> {
    static constexpr const char* kName = "q4_k_64";
};

struct Q5K64 : KBlocks<StoredQuarter<StoredQ5K>> {
    static constexpr const char* kName = "q5_k_64";
};

struct Q6K64 : KBlocks<StoredQuarter<StoredQ6K>> {
    static constexpr const char* kName = "q6_k_64";
};

}  // namespace kccl::engine
