// The common base of formats whose weights are integers in blocks of 32 columns: weight =
// (stored - kZero) * scale + minimum. A piece of a panel holds one or two blocks of 16 rows:
//
//     [block]                             integers: planes.h
//     [block][row]                        scales in FP16
//     [block][row]                        minimums in FP16, if there are any
#pragma once

#include "float16.h"
#include "planes.h"

namespace kccl::engine {

// A file's block has the scale, the minimum if HAS_MINIMUMS, the fifth bits of its integers if BITS
// is 5, and then their other bits. BITS: how many bits an integer has: 4, 5 or 8. ZERO: the integer
// that a panel has for a weight of 0. FLIPPED: the bits in which a file's integers differ from a
// panel's.
template <uint32_t BITS, int32_t ZERO, bool HAS_MINIMUMS, uint8_t FLIPPED>
struct Blocks32 : Planes<BITS> {
    using P = Planes<BITS>;
    using P::kBlockBytes, P::kRows;
    static constexpr bool kIsInteger = true;
    static constexpr int32_t kZero = ZERO;
    static constexpr bool kHasMinimums = HAS_MINIMUMS;
    static constexpr uint32_t kScalesOfBlock = 1;
    // A piece has as many blocks as make whole cache lines.
    static constexpr uint32_t kBlocks = HAS_MINIMUMS ? 1 : 2;
    static constexpr uint32_t kPairs = 16 * kBlocks;
    static constexpr uint32_t kScales = HAS_MINIMUMS ? 2 : 1;
    static constexpr uint32_t kScalesAt = kBlocks * kRows * kBlockBytes;
    static constexpr uint32_t kScaleBytes = sizeof(uint16_t);
    static constexpr uint32_t kMinimumsAt = kScalesAt + kBlocks * kRows * kScaleBytes;
    static constexpr uint32_t kPieceBytes = kScalesAt + kScales * kBlocks * kRows * kScaleBytes;
    static constexpr uint32_t kFifthsAt = kScales * kScaleBytes;
    static constexpr uint32_t kIntegersAt = kFifthsAt + (BITS == 5 ? 4 : 0);
    static constexpr uint32_t kStoredBytes = kFifthsAt + kBlockBytes;
    static_assert(kPieceBytes % 64 == 0);

    static constexpr uint64_t stored_bytes(uint32_t num_columns) {
        return uint64_t{num_columns} / 32 * kStoredBytes;
    }

    static void pack(uint8_t* panel, const uint8_t* rows, uint32_t num_rows, uint32_t num_columns) {
        const uint32_t num_blocks = num_columns / 32;
        for (uint32_t row = 0; row < num_rows; ++row) {
            const uint8_t* from = rows + row * stored_bytes(num_columns);
            for (uint32_t block = 0; block < num_blocks; ++block, from += kStoredBytes) {
                uint8_t* piece = panel + uint64_t{block / kBlocks} * kPieceBytes;
                uint8_t* to = piece + block % kBlocks * kRows * kBlockBytes + 4 * row;
                P::put(to, [&](uint32_t quad) { return quad_of(from, quad); });
                for (uint32_t i = 0; i < kScales; ++i) {
                    const uint32_t of = (i * kBlocks + block % kBlocks) * kRows + row;
                    memcpy(piece + kScalesAt + of * kScaleBytes, from + i * kScaleBytes,
                           kScaleBytes);
                }
            }
        }
    }

    static void widen(const uint8_t* stored, uint32_t num, float* out) {
        for (uint32_t i = 0; i < num; ++i) {
            const uint8_t* block = stored + i / 32 * kStoredBytes;
            const auto number =
                static_cast<int32_t>(quad_of(block, i % 32 / 4) >> 8 * (i % 4) & 255);
            float scales[2] = {};
            Float16::widen(block, kScales, scales);
            out[i] = static_cast<float>(number - ZERO) * scales[0] + scales[1];
        }
    }

    // scales() and minimums() return the scales and minimums of a vector of rows, which begins at
    // row `row`, in a block of a piece.
    template <class Vector>
    static typename Vector::Floats scales(const uint8_t* piece, uint32_t block, uint32_t row, int) {
        return Float16::rows<Vector>(piece + kScalesAt + (block * kRows + row) * kScaleBytes);
    }
    template <class Vector>
    static typename Vector::Floats minimums(const uint8_t* piece, uint32_t block, uint32_t row) {
        return Float16::rows<Vector>(piece + kMinimumsAt + (block * kRows + row) * kScaleBytes);
    }

  private:
    // Returns the four integers of quad number `quad` of a file's block, a byte each, as a panel
    // has them.
    static uint32_t quad_of(const uint8_t* block, uint32_t quad) {
        const uint8_t* integers = block + kIntegersAt;
        if constexpr (BITS == 8) {
            return word_at(integers + 4 * quad) ^ FLIPPED * kOnes;
        } else {
            uint32_t four = word_at(integers + quad % 4 * 4) >> quad / 4 * 4 & kFours;
            if constexpr (BITS == 5) {
                // The factor moves bit k of the four fifth bits to the lowest bit of byte k.
                const uint32_t fifths = word_at(block + kFifthsAt) >> 4 * quad & 15;
                four |= (fifths * 0x204081 & kOnes) << 4;
            }
            return four;
        }
    }
};

}  // namespace kccl::engine
