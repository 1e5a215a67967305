// The common base of GGUF's K formats: blocks of kColumns columns, in which each 32 or 16 have an
// integer scale of 8 bits, and each 32 an integer minimum if there are any. weight = (stored -
// kZero) * (factor * scale) + (least * minimum), where factor and least are two numbers that the
// block has. A piece of a panel holds a block of 16 rows, cut into blocks of 32 columns:
//
//     [block of 32]                       integers: planes.h
//     [block of 32][scale][row]           scales
//     [block of 32][row]                  minimums, if there are any
//     [row]                               factors in FP16
//     [row]                               leasts in FP16, if there are minimums
//
// A product of a factor and a scale, or a least and a minimum, is exact in FP32.
#pragma once

#include "float16.h"
#include "planes.h"

namespace kccl::engine {

// Stored: a struct that knows where a stored block has its numbers, as StoredQ4K does.
template <class Stored>
struct KBlocks : Planes<Stored::kBits> {
    using P = Planes<Stored::kBits>;
    using P::kBlockBytes, P::kRows;
    static constexpr bool kIsInteger = true;
    static constexpr int32_t kZero = Stored::kZero;
    static constexpr bool kHasMinimums = Stored::kHasMinimums;
    // The type of a scale: an unsigned byte or a signed one.
    using Scale = typename Stored::Scale;
    static constexpr uint32_t kScalesOfBlock = Stored::kScalesOfBlock;
    static constexpr uint32_t kColumns = Stored::kColumns;
    static constexpr uint32_t kBlocks = kColumns / 32;
    static constexpr uint32_t kPairs = 16 * kBlocks;
    static constexpr uint32_t kScalesAt = kBlocks * kRows * kBlockBytes;
    static constexpr uint32_t kMinimumsAt = kScalesAt + kBlocks * kScalesOfBlock * kRows;
    static constexpr uint32_t kFactorsAt = kMinimumsAt + (kHasMinimums ? kBlocks * kRows : 0);
    static constexpr uint32_t kFactorBytes = sizeof(uint16_t);
    static constexpr uint32_t kLeastsAt = kFactorsAt + kRows * kFactorBytes;
    static constexpr uint32_t kUsedBytes = kLeastsAt + (kHasMinimums ? kRows * kFactorBytes : 0);
    // Pieces are filled up to whole cache lines.
    static constexpr uint32_t kPieceBytes = (kUsedBytes + 63) / 64 * 64;

    static constexpr uint64_t stored_bytes(uint32_t num_columns) {
        return uint64_t{num_columns} / kColumns * Stored::kBytes;
    }

    static void pack(uint8_t* panel, const uint8_t* rows, uint32_t num_rows, uint32_t num_columns) {
        for (uint32_t row = 0; row < num_rows; ++row) {
            const uint8_t* from = rows + row * stored_bytes(num_columns);
            uint8_t* piece = panel;
            for (uint32_t first = 0; first < num_columns; first += kColumns) {
                pack_row(piece, row, from);
                from += Stored::kBytes;
                piece += kPieceBytes;
            }
        }
    }

    static void widen(const uint8_t* stored, uint32_t num, float* out) {
        for (uint32_t i = 0; i < num; ++i) {
            const uint8_t* from = stored + i / kColumns * Stored::kBytes;
            const uint32_t block = i % kColumns / 32, within = i % 32;
            const uint32_t four = Stored::quad(from, block, within / 4);
            const auto number = static_cast<int32_t>(four >> 8 * (i % 4) & 255);
            float factors[2] = {};
            for (uint32_t k = 0; k <= kHasMinimums; ++k) {
                const uint16_t bits = Stored::factor(from, k);
                Float16::widen(reinterpret_cast<const uint8_t*>(&bits), 1, factors + k);
            }
            const auto scale =
                static_cast<Scale>(Stored::scale(from, block, within * kScalesOfBlock / 32));
            out[i] = static_cast<float>(number - kZero) * (factors[0] * scale);
            if constexpr (kHasMinimums) out[i] += factors[1] * Stored::minimum(from, block);
        }
    }

    // scales() and minimums() return the scales (times the factors) and the minimums (times the
    // leasts) of a vector of rows, which begins at row `row`, in a block of 32 of a piece.
    template <class Vector>
    static typename Vector::Floats scales(const uint8_t* piece, uint32_t block, uint32_t row,
                                          int scale) {
        const uint32_t at = (block * kScalesOfBlock + scale) * kRows + row;
        return product<Vector>(
            Vector::bytes(reinterpret_cast<const Scale*>(piece + kScalesAt) + at),
            piece + kFactorsAt + row * kFactorBytes);
    }
    template <class Vector>
    static typename Vector::Floats minimums(const uint8_t* piece, uint32_t block, uint32_t row) {
        return product<Vector>(Vector::bytes(piece + kMinimumsAt + block * kRows + row),
                               piece + kLeastsAt + row * kFactorBytes);
    }

  private:
    static void pack_row(uint8_t* piece, uint32_t row, const uint8_t* from) {
        for (uint32_t block = 0; block < kBlocks; ++block) {
            P::put(piece + block * kRows * kBlockBytes + 4 * row,
                   [&](uint32_t quad) { return Stored::quad(from, block, quad); });
            for (uint32_t i = 0; i < kScalesOfBlock; ++i) {
                piece[kScalesAt + (block * kScalesOfBlock + i) * kRows + row] =
                    Stored::scale(from, block, i);
            }
            if constexpr (kHasMinimums) {
                piece[kMinimumsAt + block * kRows + row] = Stored::minimum(from, block);
            }
        }
        for (uint32_t k = 0; k <= kHasMinimums; ++k) {
            const uint16_t bits = Stored::factor(from, k);
            memcpy(piece + kFactorsAt + (k * kRows + row) * kFactorBytes, &bits, sizeof(bits));
        }
    }

    template <class Vector>
    static typename Vector::Floats product(typename Vector::Floats bytes, const uint8_t* factors) {
        return Vector::add_product(bytes, Float16::rows<Vector>(factors), Vector::zero());
    }
};

inline uint16_t half_at(const uint8_t* from) {
    uint16_t bits;
    memcpy(&bits, from, sizeof(bits));
    return bits;
}

// What Q4_K and Q5_K share. A file's block begins with two FP16 numbers: the factor, and how much a
// minimum of 1 subtracts. 8 scales and 8 minimums of 6 bits follow, in 12 bytes.
struct PackedScales {
    static constexpr uint32_t kColumns = 256;
    using Scale = uint8_t;
    static constexpr int32_t kZero = 0;
    static constexpr bool kHasMinimums = true;
    static constexpr uint32_t kScalesOfBlock = 1;
    static constexpr uint32_t kPackedAt = 4, kPackedBytes = 12;

    static uint16_t factor(const uint8_t* from, uint32_t k) {
        // A file's second number is subtracted, a panel's least is added. So its sign is flipped.
        return half_at(from + k * sizeof(uint16_t)) ^ k << 15;
    }
    static uint8_t scale(const uint8_t* from, uint32_t block, uint32_t) {
        return six_bits(from + kPackedAt, block, 0);
    }
    static uint8_t minimum(const uint8_t* from, uint32_t block) {
        return six_bits(from + kPackedAt, block, 4);
    }

  private:
    // Returns the scale (first = 0) or the minimum (first = 4) of a block of 32. The first 4 scales
    // lie in the lower 6 bits of bytes 0 to 3, the first 4 minimums in those of bytes 4 to 7. The
    // lower 4 bits of the others lie in bytes 8 to 11: the scale's below the minimum's. Their upper
    // 2 bits are the upper ones of bytes 0 to 7.
    static uint8_t six_bits(const uint8_t* packed, uint32_t block, uint32_t first) {
        if (block < 4) return packed[first + block] & 63;
        const uint32_t lower = packed[4 + block] >> first & 15;
        return static_cast<uint8_t>(lower | packed[first + block - 4] >> 6 << 4);
    }
};

}  // namespace kccl::engine
