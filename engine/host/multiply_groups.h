// Implements multiply() for formats with a scale in FP32 for each group of columns
// (formats/groups.h). A group's sum is made in a fixed order, and the scale multiplies it once. So
// the bits do not depend on the instruction set.
#pragma once

#include <algorithm>

#include "multiply_integers.h"

namespace kccl::engine {
namespace {

// Computes the sums over one group, for a vector of rows and COLUMNS columns of activations. The
// rows begin at row `first_row` of the panel. Weights are 8-bit floats. x: the first column's
// factors of the group.
template <class F, int COLUMNS>
inline void sum_floats(const uint8_t* piece, int first_row, const float* x, uint64_t stride,
                       typename Vector::Floats* sums) {
    // The weights' columns are added up in four chains, by their number modulo 4. In a single chain
    // each addition would wait for the one before.
    typename Vector::Floats chains[COLUMNS][4];
    KCCL_ENGINE_UNROLL
    for (int c = 0; c < COLUMNS; ++c) {
        KCCL_ENGINE_UNROLL
        for (int k = 0; k < 4; ++k) chains[c][k] = Vector::zero();
    }
    for (uint32_t column = 0; column < F::kGroupColumns; column += 4) {
        KCCL_ENGINE_UNROLL
        for (int k = 0; k < 4; ++k) {
            const auto weights = rows_of_e4m3<Vector>(piece + (column + k) * kRows + first_row);
            KCCL_ENGINE_UNROLL
            for (int c = 0; c < COLUMNS; ++c) {
                chains[c][k] = Vector::fma(weights, x[c * stride + column + k], chains[c][k]);
            }
        }
    }
    KCCL_ENGINE_UNROLL
    for (int c = 0; c < COLUMNS; ++c) {
        sums[c] = Vector::add(Vector::add(chains[c][0], chains[c][1]),
                              Vector::add(chains[c][2], chains[c][3]));
    }
}

// Does what sum_floats() does, for weights that are integers. x: the first column's digits of the
// group.
template <class F, int COLUMNS>
inline void sum_integers(const uint8_t* piece, int first_row, const DigitGroup* x, uint64_t stride,
                         typename Vector::Floats* sums) {
    using Summing = IntegersOf<F>;
    float totals[COLUMNS] = {};
    KCCL_ENGINE_UNROLL
    for (int c = 0; c < COLUMNS; ++c) sums[c] = Vector::zero();
    for (uint32_t block = 0; block < F::kGroupColumns / kDigitGroup; ++block) {
        const uint8_t* rows = piece + block * kRows * F::kBlockBytes + 4 * first_row;
        typename Summing::Sum integers[COLUMNS];
        KCCL_ENGINE_UNROLL
        for (int c = 0; c < COLUMNS; ++c) {
            integers[c] = Summing::start(x[c * stride + block].start[0]);
        }
        KCCL_ENGINE_UNROLL
        for (int i = 0; i < 8; ++i) {
            int quad;
            const Integers::Words words = block_words<F>(rows, i, &quad);
            KCCL_ENGINE_UNROLL
            for (int c = 0; c < COLUMNS; ++c) {
                Summing::add(&integers[c], words, x[c * stride + block], quad, i);
            }
        }
        KCCL_ENGINE_UNROLL
        for (int c = 0; c < COLUMNS; ++c) {
            const DigitGroup& of = x[c * stride + block];
            const auto number =
                Vector::fma(Summing::upper(integers[c]), 256.0f, Summing::lower(integers[c]));
            sums[c] = Vector::fma(number, of.scale, sums[c]);
            totals[c] += of.sum;
        }
    }
    if constexpr (F::kHasZeros) {
        const auto zeros = F::template zeros<Vector>(piece, first_row);
        KCCL_ENGINE_UNROLL
        for (int c = 0; c < COLUMNS; ++c) {
            sums[c] = Vector::fma(zeros, -totals[c], sums[c]);
        }
    }
}

template <class F, int COLUMNS, bool DECODES>
inline void multiply_rows_in_groups(const uint8_t* panel, uint64_t panel_bytes, int first_row,
                                    uint32_t num_groups, const float* x, uint64_t stride,
                                    float* out) {
    typename Vector::Floats sums[COLUMNS];
    KCCL_ENGINE_UNROLL
    for (int c = 0; c < COLUMNS; ++c) sums[c] = Vector::zero();
    for (uint32_t group = 0; group < num_groups; ++group) {
        const uint8_t* piece = panel + uint64_t{group} * F::kPieceBytes;
        if (first_row == 0) {
            for (uint32_t at = 0; at < F::kPieceBytes; at += 64) {
                if constexpr (DECODES) {
                    __builtin_prefetch(piece + at + kAheadBytes);
                } else {
                    __builtin_prefetch(piece + at + kPanels * panel_bytes, 0, 2);
                }
            }
        }
        typename Vector::Floats of_group[COLUMNS];
        if constexpr (F::kIsInteger) {
            constexpr uint64_t kFloats = sizeof(DigitGroup) / sizeof(float);
            const auto* digits = reinterpret_cast<const DigitGroup*>(x);
            sum_integers<F, COLUMNS>(piece, first_row,
                                     digits + uint64_t{group} * (F::kGroupColumns / kDigitGroup),
                                     stride / kFloats, of_group);
        } else {
            sum_floats<F, COLUMNS>(piece, first_row, x + uint64_t{group} * F::kGroupColumns, stride,
                                   of_group);
        }
        const auto scales =
            Vector::floats(Vector::words(piece + F::kScalesAt + first_row * F::kScaleBytes));
        KCCL_ENGINE_UNROLL
        for (int c = 0; c < COLUMNS; ++c) {
            sums[c] = Vector::add_product(scales, of_group[c], sums[c]);
        }
    }
    KCCL_ENGINE_UNROLL
    for (int c = 0; c < COLUMNS; ++c) {
        Vector::store(out + c * kPanels * kRows + first_row, sums[c]);
    }
}

template <class F, int COLUMNS>
void multiply_groups(const uint8_t* panels, int num_panels, uint32_t num_pairs, const float* x,
                     uint64_t stride, float* out) {
    constexpr int kColumns = std::min(COLUMNS, Vector::kTileColumns);
    const uint64_t bytes = panel_bytes<F>(2 * num_pairs);
    const uint32_t num_groups = num_pairs / F::kPairs;
    for (int c = 0; c < COLUMNS; c += kColumns) {
        for (int panel = 0; panel < num_panels; ++panel) {
            float* to = out + c * kPanels * kRows + panel * kRows;
            for (int row = 0; row < kRows; row += Vector::kWidth) {
                multiply_rows_in_groups<F, kColumns, COLUMNS == 1>(
                    panels + panel * bytes, bytes, row, num_groups, x + c * stride, stride, to);
            }
        }
    }
}

}  // namespace
}  // namespace kccl::engine
