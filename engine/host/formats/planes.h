// Lays out the integers of a block of 32 columns and 16 rows as a panel has them. A quad is four
// columns that lie side by side. A word has the integers of one quad, or their bits, in one row:
//
//     [quad][row]              integers of 8 bits
//     [quad % 4][row]          integers of 4 bits, or the lower 4 bits of longer ones: quad i, and
//                              above it quad i + 4
//     [quad / n][row]          behind those words: the bits above the lower 4. n quads share a
//                              word: n is 8 if an integer has one such bit, 4 if it has two
#pragma once

#include <stdint.h>
#include <string.h>

#include "../api.h"

namespace kccl::engine {

// Masks for words of four bytes: bytes below 16, below 2, and below 4.
constexpr uint32_t kFours = 0x0f0f0f0f, kOnes = 0x01010101, kThrees = 0x03030303;

inline uint32_t word_at(const uint8_t* from) {
    uint32_t word;
    memcpy(&word, from, sizeof(word));
    return word;
}

// BITS: how many bits an integer has: 4, 5, 6 or 8.
template <uint32_t BITS>
struct Planes {
    static constexpr uint32_t kRows = kKcclEnginePanelRows;
    static constexpr uint32_t kBits = BITS;
    static constexpr uint32_t kBlockBytes = 32 * BITS / 8;
    // kHighBits: how many bits an integer has above its lower 4. kTogether: how many quads share a
    // word of these bits.
    static constexpr uint32_t kHighBits = BITS == 8 ? 0 : BITS - 4;
    static constexpr uint32_t kTogether = kHighBits == 0 ? 8 : 8 / kHighBits;

    // Writes the integers of one row of a block, whose bytes must be zeros before. to: the row's
    // first word. quad_of(i) returns the four integers of quad i, a byte each.
    template <class QuadOf>
    static void put(uint8_t* to, QuadOf quad_of) {
        for (uint32_t quad = 0; quad < 8; ++quad) {
            const uint32_t four = quad_of(quad);
            if constexpr (BITS == 8) {
                add(to, quad, four);
            } else {
                add(to, quad % 4, (four & kFours) << quad / 4 * 4);
                if constexpr (kHighBits != 0) {
                    const uint32_t high = four >> 4 & (kHighBits == 1 ? kOnes : kThrees);
                    add(to, 4 + quad / kTogether, high << quad % kTogether * kHighBits);
                }
            }
        }
    }

  private:
    static void add(uint8_t* to, uint32_t word, uint32_t bits) {
        uint8_t* at = to + word * kRows * sizeof(bits);
        bits |= word_at(at);
        memcpy(at, &bits, sizeof(bits));
    }
};

}  // namespace kccl::engine
