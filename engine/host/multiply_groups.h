// Implements multiply() for formats with a scale in FP32 for each group of columns
// (formats/groups.h). A group's sum is made in a fixed order, and the scale multiplies it once. So
// the bits do not depend on the instruction set.
#pragma once

#include <algorithm>

#include "multiply_integers.h"

namespace kccl::engine {
namespace {

// Computes the sums over one group, for VECTORS vectors of rows and COLUMNS columns of activations.
// The rows begin at row `first_row` of the panel. Weights are 8-bit floats. x: the first column's
// factors of the group.
template <class F, int VECTORS, int COLUMNS, bool DECODES>
inline void sum_floats(const uint8_t* piece, uint64_t panel_bytes, int first_row, const float* x,
                       uint64_t stride, typename Vector::Floats (*sums)[COLUMNS]) {
    // The weights' columns are added up in four chains, by their number modulo 4. In a single chain
    // each addition would wait for the one before.
    typename Vector::Floats chains[VECTORS][COLUMNS][4];
    KCCL_ENGINE_UNROLL
    for (int v = 0; v < VECTORS; ++v) {
        KCCL_ENGINE_UNROLL
        for (int c = 0; c < COLUMNS; ++c) {
            KCCL_ENGINE_UNROLL
            for (int k = 0; k < 4; ++k) chains[v][c][k] = Vector::zero();
        }
    }
    for (uint32_t column = 0; column < F::kGroupColumns; column += 4) {
        if (first_row == 0) prefetch<DECODES>(piece + column * kRows, panel_bytes);
        KCCL_ENGINE_UNROLL
        for (int k = 0; k < 4; ++k) {
            KCCL_ENGINE_UNROLL
            for (int v = 0; v < VECTORS; ++v) {
                const auto weights = rows_of_e4m3<Vector>(piece + (column + k) * kRows + first_row +
                                                          v * Vector::kWidth);
                KCCL_ENGINE_UNROLL
                for (int c = 0; c < COLUMNS; ++c) {
                    chains[v][c][k] =
                        Vector::fma(weights, x[c * stride + column + k], chains[v][c][k]);
                }
            }
        }
    }
    KCCL_ENGINE_UNROLL
    for (int v = 0; v < VECTORS; ++v) {
        KCCL_ENGINE_UNROLL
        for (int c = 0; c < COLUMNS; ++c) {
            sums[v][c] = Vector::add(Vector::add(chains[v][c][0], chains[v][c][1]),
                                     Vector::add(chains[v][c][2], chains[v][c][3]));
        }
    }
}

// Does what sum_floats() does, for weights that are integers. x: the first column's digits of the
// group.
template <class F, int VECTORS, int COLUMNS, bool DECODES>
inline void sum_integers(const uint8_t* piece, uint64_t panel_bytes, int first_row,
                         const DigitGroup* x, uint64_t stride,
                         typename Vector::Floats (*sums)[COLUMNS]) {
    using Summing = IntegersOf<F>;
    float totals[COLUMNS] = {};
    KCCL_ENGINE_UNROLL
    for (int v = 0; v < VECTORS; ++v) {
        KCCL_ENGINE_UNROLL
        for (int c = 0; c < COLUMNS; ++c) sums[v][c] = Vector::zero();
    }
    for (uint32_t block = 0; block < F::kGroupColumns / kDigitGroup; ++block) {
        constexpr uint32_t kBytes = kRows * F::kBlockBytes;
        const uint8_t* rows = piece + block * kBytes + 4 * first_row;
        typename Summing::Sum integers[VECTORS][COLUMNS];
        KCCL_ENGINE_UNROLL
        for (int c = 0; c < COLUMNS; ++c) {
            KCCL_ENGINE_UNROLL
            for (int v = 0; v < VECTORS; ++v) {
                integers[v][c] = Summing::start(x[c * stride + block].start[0]);
            }
        }
        KCCL_ENGINE_UNROLL
        for (int i = 0; i < 8; ++i) {
            if (first_row == 0) {
                prefetch_lines<kBytes, DECODES>(piece + block * kBytes, i, panel_bytes);
            }
            KCCL_ENGINE_UNROLL
            for (int v = 0; v < VECTORS; ++v) {
                int quad;
                const Integers::Words words =
                    block_words<F>(rows + v * 4 * Vector::kWidth, i, &quad);
                KCCL_ENGINE_UNROLL
                for (int c = 0; c < COLUMNS; ++c) {
                    Summing::add(&integers[v][c], words, x[c * stride + block], quad, i);
                }
            }
        }
        KCCL_ENGINE_UNROLL
        for (int c = 0; c < COLUMNS; ++c) {
            const DigitGroup& of = x[c * stride + block];
            KCCL_ENGINE_UNROLL
            for (int v = 0; v < VECTORS; ++v) {
                const auto number = Vector::fma(Summing::upper(integers[v][c]), 256.0f,
                                                Summing::lower(integers[v][c]));
                sums[v][c] = Vector::fma(number, of.scale, sums[v][c]);
            }
            totals[c] += of.sum;
        }
    }
    if constexpr (F::kHasZeros) {
        KCCL_ENGINE_UNROLL
        for (int v = 0; v < VECTORS; ++v) {
            const auto zeros = F::template zeros<Vector>(piece, first_row + v * Vector::kWidth);
            KCCL_ENGINE_UNROLL
            for (int c = 0; c < COLUMNS; ++c) {
                sums[v][c] = Vector::fma(zeros, -totals[c], sums[v][c]);
            }
        }
    }
}

template <class F, int VECTORS, int COLUMNS, bool DECODES>
inline void multiply_rows_in_groups(const uint8_t* panel, uint64_t panel_bytes, int first_row,
                                    uint32_t num_groups, const float* x, uint64_t stride,
                                    float* out) {
    typename Vector::Floats sums[VECTORS][COLUMNS];
    KCCL_ENGINE_UNROLL
    for (int v = 0; v < VECTORS; ++v) {
        KCCL_ENGINE_UNROLL
        for (int c = 0; c < COLUMNS; ++c) sums[v][c] = Vector::zero();
    }
    for (uint32_t group = 0; group < num_groups; ++group) {
        const uint8_t* piece = panel + uint64_t{group} * F::kPieceBytes;
        if (first_row == 0) {
            for (uint32_t at = F::kScalesAt; at < F::kPieceBytes; at += 64) {
                prefetch<DECODES>(piece + at, panel_bytes);
            }
        }
        typename Vector::Floats of_group[VECTORS][COLUMNS];
        if constexpr (F::kIsInteger) {
            constexpr uint64_t kFloats = sizeof(DigitGroup) / sizeof(float);
            const auto* digits = reinterpret_cast<const DigitGroup*>(x);
            sum_integers<F, VECTORS, COLUMNS, DECODES>(
                piece, panel_bytes, first_row,
                digits + uint64_t{group} * (F::kGroupColumns / kDigitGroup), stride / kFloats,
                of_group);
        } else {
            sum_floats<F, VECTORS, COLUMNS, DECODES>(piece, panel_bytes, first_row,
                                                     x + uint64_t{group} * F::kGroupColumns, stride,
                                                     of_group);
        }
        KCCL_ENGINE_UNROLL
        for (int v = 0; v < VECTORS; ++v) {
            const int row = first_row + v * Vector::kWidth;
            const auto scales =
                Vector::floats(Vector::words(piece + F::kScalesAt + row * F::kScaleBytes));
            KCCL_ENGINE_UNROLL
            for (int c = 0; c < COLUMNS; ++c) {
                sums[v][c] = Vector::add_product(scales, of_group[v][c], sums[v][c]);
            }
        }
    }
    KCCL_ENGINE_UNROLL
    for (int v = 0; v < VECTORS; ++v) {
        KCCL_ENGINE_UNROLL
        for (int c = 0; c < COLUMNS; ++c) {
            Vector::store(out + c * kPanels * kRows + first_row + v * Vector::kWidth, sums[v][c]);
        }
    }
}

template <class F, int COLUMNS>
void multiply_groups(const uint8_t* panels, int num_panels, uint32_t num_pairs, const float* x,
                     uint64_t stride, float* out) {
    constexpr int kColumns = std::min(COLUMNS, Vector::kTileColumns);
    constexpr int kVectors = vectors_at_once(COLUMNS);
    const uint64_t bytes = panel_bytes<F>(2 * num_pairs);
    const uint32_t num_groups = num_pairs / F::kPairs;
    for (int c = 0; c < COLUMNS; c += kColumns) {
        for (int panel = 0; panel < num_panels; ++panel) {
            float* to = out + c * kPanels * kRows + panel * kRows;
            for (int row = 0; row < kRows; row += kVectors * Vector::kWidth) {
                multiply_rows_in_groups<F, kVectors, kColumns, COLUMNS == 1>(
                    panels + panel * bytes, bytes, row, num_groups, x + c * stride, stride, to);
            }
        }
    }
}

}  // namespace
}  // namespace kccl::engine
