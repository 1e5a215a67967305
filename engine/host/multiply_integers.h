// Implements multiply() for formats whose weights are integers with scales. The sum over the 32 or
// 16 columns that share a scale is exact (integers.h). It becomes FP32 in a fixed order, and is
// then multiplied by the scales of the weights and of the vector.
#pragma once

#include <algorithm>

#include "integers.h"
#include "products.h"

namespace kccl::engine {
namespace {

template <bool IS_SHORT, int32_t ZERO, uint32_t SCALES>
void prepare(const float* x, uint32_t num_columns, DigitGroup* to) {
    // All short integers take the same digits.
    using Placing = IntegersUpTo<IS_SHORT ? 15 : 255>;
    for (uint32_t i = 0; i < num_columns / kDigitGroup; ++i) {
        make_digits<Placing>(x + i * kDigitGroup, ZERO, SCALES, to + i);
    }
}

// Returns the function that prepares the activations for format F, or null if they are multiplied
// as they are. Formats that take the same digits have the same function, so that Pass::multiply()
// can use prepared activations again.
template <class F>
constexpr Prepare prepare_of() {
    if constexpr (F::kIsInteger) {
        return prepare<most_of<F>() < 64, F::kZero, F::kScalesOfBlock>;
    }
    return nullptr;
}

// Returns the integers of a vector of rows in the i-th register of a block of 32 columns. *quad
// becomes the number of the four columns to which they belong.
template <class F>
inline Integers::Words block_words(const uint8_t* rows, int i, int* quad) {
    constexpr int kQuadBytes = 4 * kRows;
    if constexpr (F::kBits == 8) {
        *quad = i;
        return Integers::words(rows + i * kQuadBytes);
    } else {
        const Integers::Words both = Integers::words(rows + i / 2 * kQuadBytes);
        *quad = i / 2 + i % 2 * 4;
        const Integers::Words words = i % 2 == 0 ? Integers::low(both) : Integers::high(both);
        if constexpr (requires { F::kIntegers; }) {
            return Integers::looked_up(words, F::kIntegers);
        } else if constexpr (F::kHighBits == 0) {
            return words;
        } else {
            constexpr int kTogether = F::kTogether, kBits = F::kHighBits;
            const uint8_t* above = rows + (4 + *quad / kTogether) * kQuadBytes;
            return Integers::with_bits(words, Integers::words(above), 4 - *quad % kTogether * kBits,
                                       ((1 << kBits) - 1) << 4);
        }
    }
}

// Computes the sums of a vector of rows, for COLUMNS columns of activations. The rows begin at row
// `first_row` of the panel.
template <class F, int COLUMNS, bool DECODES>
inline void multiply_rows(const uint8_t* panel, uint64_t panel_bytes, int first_row,
                          uint32_t num_blocks, const DigitGroup* x, uint64_t stride, float* out) {
    using Summing = IntegersOf<F>;
    typename Vector::Floats sums[COLUMNS];
    KCCL_ENGINE_UNROLL
    for (int c = 0; c < COLUMNS; ++c) sums[c] = Vector::zero();
    for (uint32_t block = 0; block < num_blocks; ++block) {
        const uint32_t in_piece = block % F::kBlocks;
        const uint8_t* piece = panel + uint64_t{block / F::kBlocks} * F::kPieceBytes;
        if (first_row == 0) {
            constexpr uint32_t kBytes = F::kPieceBytes / F::kBlocks;
            KCCL_ENGINE_UNROLL
            for (uint32_t at = 0; at < kBytes; at += 64) {
                const uint8_t* ahead = piece + in_piece * kBytes + at;
                if constexpr (DECODES) {
                    __builtin_prefetch(ahead + kAheadBytes);
                } else {
                    __builtin_prefetch(ahead + kPanels * panel_bytes, 0, 2);
                }
            }
        }
        const uint8_t* rows = piece + in_piece * kRows * F::kBlockBytes + 4 * first_row;
        constexpr int kScales = F::kScalesOfBlock;
        typename Summing::Sum integers[COLUMNS][kScales];
        KCCL_ENGINE_UNROLL
        for (int c = 0; c < COLUMNS; ++c) {
            KCCL_ENGINE_UNROLL
            for (int s = 0; s < kScales; ++s) {
                integers[c][s] = Summing::start(x[c * stride + block].start[s]);
            }
        }
        KCCL_ENGINE_UNROLL
        for (int i = 0; i < 8; ++i) {
            int quad;
            const Integers::Words words = block_words<F>(rows, i, &quad);
            KCCL_ENGINE_UNROLL
            for (int c = 0; c < COLUMNS; ++c) {
                Summing::add(&integers[c][quad * kScales / 8], words, x[c * stride + block], quad,
                             i / kScales);
            }
        }
        KCCL_ENGINE_UNROLL
        for (int s = 0; s < kScales; ++s) {
            const auto scale = F::template scales<Vector>(piece, in_piece, first_row, s);
            KCCL_ENGINE_UNROLL
            for (int c = 0; c < COLUMNS; ++c) {
                const float of = x[c * stride + block].scale;
                const auto number = Vector::fma(Summing::upper(integers[c][s]), 256.0f,
                                                Summing::lower(integers[c][s]));
                sums[c] = Vector::add_product(scale, Vector::times(number, of), sums[c]);
            }
        }
        if constexpr (F::kHasMinimums) {
            const auto minimum = F::template minimums<Vector>(piece, in_piece, first_row);
            KCCL_ENGINE_UNROLL
            for (int c = 0; c < COLUMNS; ++c) {
                sums[c] = Vector::fma(minimum, x[c * stride + block].sum, sums[c]);
            }
        }
    }
    KCCL_ENGINE_UNROLL
    for (int c = 0; c < COLUMNS; ++c) {
        Vector::store(out + c * kPanels * kRows + first_row, sums[c]);
    }
}

template <class F, int COLUMNS>
void multiply_integers(const uint8_t* panels, int num_panels, uint32_t num_pairs, const float* x,
                       uint64_t stride, float* out) {
    constexpr int kColumns = std::min(COLUMNS, Vector::kTileColumns);
    constexpr uint64_t kFloats = sizeof(DigitGroup) / sizeof(float);
    const uint64_t bytes = panel_bytes<F>(2 * num_pairs), groups = stride / kFloats;
    const uint32_t num_blocks = 2 * num_pairs / kDigitGroup;
    const auto* digits = reinterpret_cast<const DigitGroup*>(x);
    for (int c = 0; c < COLUMNS; c += kColumns) {
        for (int panel = 0; panel < num_panels; ++panel) {
            float* to = out + c * kPanels * kRows + panel * kRows;
            for (int row = 0; row < kRows; row += Vector::kWidth) {
                multiply_rows<F, kColumns, COLUMNS == 1>(panels + panel * bytes, bytes, row,
                                                         num_blocks, digits + c * groups, groups,
                                                         to);
            }
        }
    }
}

}  // namespace
}  // namespace kccl::engine
