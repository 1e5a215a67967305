// NVFP4: groups of floats of 4 bits, e2m1, with a scale in e4m3 for each 16 columns and a factor in
// FP32 for the whole group: weight = number * (scale * factor). The twin of formats/nvfp4.py. A
// group is stored as
//
//     factor | scale of each 16 columns | [block of 32 columns] numbers
//
// A panel has scales as e4m3.h widens them, 256 times smaller, and numbers twice as large. So its
// factors are 128 times larger. A piece of a panel holds a group of 16 rows:
//
//     [block of 32]                       numbers: planes.h
//     [block of 32][half][row]            scales
//     [row]                               factors
#pragma once

#include "e2m1.h"
#include "e4m3.h"

namespace kccl::engine {

template <uint32_t COLUMNS>
struct Nvfp4 : E2m1 {
    static constexpr const char* kName = COLUMNS == 128 ? "nvfp4_128" : "nvfp4_32";
    static constexpr uint32_t kScalesOfBlock = 2;
    static constexpr uint32_t kBlocks = COLUMNS / 32;
    static constexpr uint32_t kPairs = COLUMNS / 2;
    static constexpr uint32_t kScalesAt = kBlocks * kRows * kBlockBytes;
    static constexpr uint32_t kFactorsAt = kScalesAt + kBlocks * kScalesOfBlock * kRows;
    static constexpr uint32_t kFactorBytes = sizeof(float);
    static constexpr uint32_t kPieceBytes = kFactorsAt + kRows * kFactorBytes;
    static constexpr uint32_t kNumbersAt = kFactorBytes + kBlocks * kScalesOfBlock;
    static constexpr uint32_t kStoredBytes = kNumbersAt + kBlocks * kBlockBytes;

    static constexpr uint64_t stored_bytes(uint32_t num_columns) {
        return uint64_t{num_columns} / COLUMNS * kStoredBytes;
    }

    static void pack(uint8_t* panel, const uint8_t* rows, uint32_t num_rows, uint32_t num_columns) {
        for (uint32_t row = 0; row < num_rows; ++row) {
            const uint8_t* from = rows + row * stored_bytes(num_columns);
            uint8_t* piece = panel;
            for (uint32_t first = 0; first < num_columns; first += COLUMNS) {
                const float factor = factor_of(from) * 128;
                memcpy(piece + kFactorsAt + row * kFactorBytes, &factor, sizeof(factor));
                for (uint32_t i = 0; i < kBlocks * kScalesOfBlock; ++i) {
                    piece[kScalesAt + i * kRows + row] = from[kFactorBytes + i];
                }
                for (uint32_t at = 0; at < kBlocks * kBlockBytes; at += sizeof(uint32_t)) {
                    memcpy(piece + at * kRows + row * sizeof(uint32_t), from + kNumbersAt + at,
                           sizeof(uint32_t));
                }
                from += kStoredBytes;
                piece += kPieceBytes;
            }
        }
    }

    static void widen(const uint8_t* stored, uint32_t num, float* out) {
        for (uint32_t i = 0; i < num; ++i) {
            const uint8_t* group = stored + uint64_t{i / COLUMNS} * kStoredBytes;
            const uint32_t within = i % COLUMNS;
            const uint32_t scale = group[kFactorBytes + within / 16];
            const int32_t number = twice(group + kNumbersAt + within / 32 * kBlockBytes, i % 32);
            out[i] = static_cast<float>(number) *
                     (Float16::number(half_of_e4m3(scale)) * (factor_of(group) * 128));
        }
    }

    // Returns half the scales, times the factors, of a vector of rows that begins at row `row`, for
    // one half (16 columns) of a block of a piece.
    template <class Vector>
    static typename Vector::Floats scales(const uint8_t* piece, uint32_t block, uint32_t row,
                                          int half) {
        const uint8_t* of_half = piece + kScalesAt + (block * kScalesOfBlock + half) * kRows;
        const auto factors = Vector::floats(Vector::words(piece + kFactorsAt + row * kFactorBytes));
        return Vector::add_product(rows_of_e4m3<Vector>(of_half + row), factors, Vector::zero());
    }

  private:
    static float factor_of(const uint8_t* group) {
        float factor;
        memcpy(&factor, group, sizeof(factor));
        return factor;
    }
};

using Nvfp4By128 = Nvfp4<128>;
using Nvfp4By32 = Nvfp4<32>;

}  // namespace kccl::engine
