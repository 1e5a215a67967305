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

// Returns how many vectors of rows are multiplied at a time. Two vectors of 8 rows load each digit
// once, and read whole lines of weights in the order in which they lie. So memory is never idle. A
// product with several columns has no registers left for a second vector.
constexpr int vectors_at_once(int columns) {
    return columns == 1 ? std::min(2, kRows / Vector::kWidth) : 1;
}

// Prefetches line number `i` of BYTES of weights, and line i + 8, if there are such lines. i: 0 to
// 7. If all lines were prefetched at once, loads would wait for them.
template <uint32_t BYTES, bool DECODES>
__attribute__((always_inline)) inline void prefetch_lines(const uint8_t* from, uint32_t i,
                                                          uint64_t panel_bytes) {
    static_assert(BYTES <= 16 * 64);
    if (64 * i < BYTES) prefetch<DECODES>(from + 64 * i, panel_bytes);
    if (64 * (i + 8) < BYTES) prefetch<DECODES>(from + 64 * (i + 8), panel_bytes);
}

// Computes the sums of VECTORS vectors of rows, for COLUMNS columns of activations. The rows begin
// at row `first_row` of the panel. DECODES: how it prefetches weights (products.h).
template <class F, int VECTORS, int COLUMNS, bool DECODES>
inline void multiply_rows(const uint8_t* panel, uint64_t panel_bytes, int first_row,
                          uint32_t num_blocks, const DigitGroup* x, uint64_t stride, float* out) {
    using Summing = IntegersOf<F>;
    constexpr int kWidth = Vector::kWidth;
    typename Vector::Floats sums[VECTORS][COLUMNS];
    KCCL_ENGINE_UNROLL
    for (int v = 0; v < VECTORS; ++v) {
        KCCL_ENGINE_UNROLL
        for (int c = 0; c < COLUMNS; ++c) sums[v][c] = Vector::zero();
    }
    for (uint32_t block = 0; block < num_blocks; ++block) {
        const uint32_t in_piece = block % F::kBlocks;
        const uint8_t* piece = panel + uint64_t{block / F::kBlocks} * F::kPieceBytes;
        constexpr uint32_t kBytes = F::kPieceBytes / F::kBlocks;
        const uint8_t* rows = piece + in_piece * kRows * F::kBlockBytes + 4 * first_row;
        constexpr int kScales = F::kScalesOfBlock;
        typename Summing::Sum integers[VECTORS][COLUMNS][kScales];
        KCCL_ENGINE_UNROLL
        for (int c = 0; c < COLUMNS; ++c) {
            KCCL_ENGINE_UNROLL
            for (int s = 0; s < kScales; ++s) {
                KCCL_ENGINE_UNROLL
                for (int v = 0; v < VECTORS; ++v) {
                    integers[v][c][s] = Summing::start(x[c * stride + block].start[s]);
                }
            }
        }
        KCCL_ENGINE_UNROLL
        for (int i = 0; i < 8; ++i) {
            if (first_row == 0) {
                prefetch_lines<kBytes, DECODES>(piece + in_piece * kBytes, i, panel_bytes);
            }
            KCCL_ENGINE_UNROLL
            for (int v = 0; v < VECTORS; ++v) {
                int quad;
                const Integers::Words words = block_words<F>(rows + v * 4 * kWidth, i, &quad);
                KCCL_ENGINE_UNROLL
                for (int c = 0; c < COLUMNS; ++c) {
                    Summing::add(&integers[v][c][quad * kScales / 8], words, x[c * stride + block],
                                 quad, i / kScales);
                }
            }
        }
        KCCL_ENGINE_UNROLL
        for (int v = 0; v < VECTORS; ++v) {
            const int row = first_row + v * kWidth;
            KCCL_ENGINE_UNROLL
            for (int s = 0; s < kScales; ++s) {
                const auto scale = F::template scales<Vector>(piece, in_piece, row, s);
                KCCL_ENGINE_UNROLL
                for (int c = 0; c < COLUMNS; ++c) {
                    const float of = x[c * stride + block].scale;
                    const auto number = Vector::fma(Summing::upper(integers[v][c][s]), 256.0f,
                                                    Summing::lower(integers[v][c][s]));
                    sums[v][c] = Vector::add_product(scale, Vector::times(number, of), sums[v][c]);
                }
            }
            if constexpr (F::kHasMinimums) {
                const auto minimum = F::template minimums<Vector>(piece, in_piece, row);
                KCCL_ENGINE_UNROLL
                for (int c = 0; c < COLUMNS; ++c) {
                    sums[v][c] = Vector::fma(minimum, x[c * stride + block].sum, sums[v][c]);
                }
            }
        }
    }
    KCCL_ENGINE_UNROLL
    for (int v = 0; v < VECTORS; ++v) {
        KCCL_ENGINE_UNROLL
        for (int c = 0; c < COLUMNS; ++c) {
            Vector::store(out + c * kPanels * kRows + first_row + v * kWidth, sums[v][c]);
        }
    }
}

template <class F, int COLUMNS>
void multiply_integers(const uint8_t* panels, int num_panels, uint32_t num_pairs, const float* x,
                       uint64_t stride, float* out) {
    constexpr int kColumns = std::min(COLUMNS, Vector::kTileColumns);
    constexpr int kVectors = vectors_at_once(COLUMNS);
    constexpr uint64_t kFloats = sizeof(DigitGroup) / sizeof(float);
    const uint64_t bytes = panel_bytes<F>(2 * num_pairs), groups = stride / kFloats;
    const uint32_t num_blocks = 2 * num_pairs / kDigitGroup;
    const auto* digits = reinterpret_cast<const DigitGroup*>(x);
    for (int c = 0; c < COLUMNS; c += kColumns) {
        for (int panel = 0; panel < num_panels; ++panel) {
            float* to = out + c * kPanels * kRows + panel * kRows;
            for (int row = 0; row < kRows; row += kVectors * Vector::kWidth) {
                multiply_rows<F, kVectors, kColumns, COLUMNS == 1>(panels + panel * bytes, bytes,
                                                                   row, num_blocks,
                                                                   digits + c * groups, groups, to);
            }
        }
    }
}

}  // namespace
}  // namespace kccl::engine
