// Implements multiply() for the instruction set that the compiler's flags name. A Vector (vector.h)
// holds Vector::kWidth rows. Vector::kTile is the number of sums that fill the registers. Each sum
// takes one register for even columns and one for odd columns. The sums of a tile belong to at most
// Vector::kTileColumns columns of activations, because a square tile needs the fewest loads.
#pragma once

#include <algorithm>

#include "multiply_groups.h"
#include "products.h"

namespace kccl::engine {
namespace {

// Computes the sums of VECTORS vectors of rows, for COLUMNS columns of activations. DECODES: how it
// prefetches weights (products.h).
template <class F, int VECTORS, int COLUMNS, bool DECODES>
inline void multiply_tile(const uint8_t* panels, uint64_t panel_bytes, uint32_t num_pairs,
                          const float* x, uint64_t stride, float* out) {
    constexpr int kPerPanel = kRows / Vector::kWidth;
    typename Vector::Floats even[VECTORS][COLUMNS], odd[VECTORS][COLUMNS];
    const uint8_t* at[VECTORS];
    KCCL_ENGINE_UNROLL
    for (int v = 0; v < VECTORS; ++v) {
        at[v] =
            panels + v / kPerPanel * panel_bytes + v % kPerPanel * Vector::kWidth * F::kRowBytes;
        KCCL_ENGINE_UNROLL
        for (int c = 0; c < COLUMNS; ++c) even[v][c] = odd[v][c] = Vector::zero();
    }
    for (uint32_t pair = 0; pair < num_pairs; ++pair) {
        KCCL_ENGINE_UNROLL
        for (int v = 0; v < VECTORS; ++v) {
            typename Vector::Floats of_even, of_odd;
            const uint8_t* from = at[v] + uint64_t{pair / F::kPairs} * F::kPieceBytes;
            if (v % kPerPanel == 0) prefetch<DECODES>(from, panel_bytes);
            F::template load<Vector>(from, pair % F::kPairs, &of_even, &of_odd);
            KCCL_ENGINE_UNROLL
            for (int c = 0; c < COLUMNS; ++c) {
                const float* factors = x + c * stride + uint64_t{pair} * 2;
                even[v][c] = Vector::fma(of_even, factors[0], even[v][c]);
                odd[v][c] = Vector::fma(of_odd, factors[1], odd[v][c]);
            }
        }
    }
    KCCL_ENGINE_UNROLL
    for (int v = 0; v < VECTORS; ++v) {
        KCCL_ENGINE_UNROLL
        for (int c = 0; c < COLUMNS; ++c) {
            Vector::store(out + c * kPanels * kRows + v * Vector::kWidth,
                          Vector::add(even[v][c], odd[v][c]));
        }
    }
}

// Computes the sums of all rows of the panels, in tiles that fill the registers.
template <class F, int COLUMNS>
void multiply_columns(const uint8_t* panels, int num_panels, uint32_t num_pairs, const float* x,
                      uint64_t stride, float* out) {
    constexpr int kColumns = std::min(COLUMNS, Vector::kTileColumns);
    constexpr int kPerPanel = kRows / Vector::kWidth;
    constexpr int kMost = COLUMNS == 1 ? kPerPanel : kPanels * kPerPanel;
    constexpr int kVectors = std::min(Vector::kTile / kColumns, kMost);
    const uint64_t bytes = panel_bytes<F>(2 * num_pairs);
    const int total = num_panels * kPerPanel;
    // Returns the address of the tile whose first vector of rows is v. A tile begins where a panel
    // does, or lies within one.
    const auto start = [&](int v) {
        return panels + v / kPerPanel * bytes + v % kPerPanel * Vector::kWidth * F::kRowBytes;
    };
    for (int c = 0; c < COLUMNS; c += kColumns) {
        float* to = out + c * kPanels * kRows;
        int v = 0;
        for (; v + kVectors <= total; v += kVectors) {
            multiply_tile<F, kVectors, kColumns, COLUMNS == 1>(
                start(v), bytes, num_pairs, x + c * stride, stride, to + v * Vector::kWidth);
        }
        for (; v < total; ++v) {
            multiply_tile<F, 1, kColumns, COLUMNS == 1>(start(v), bytes, num_pairs, x + c * stride,
                                                        stride, to + v * Vector::kWidth);
        }
    }
}

template <class F, int COLUMNS>
void multiply_columns_of(const uint8_t* panels, int num_panels, uint32_t num_pairs, const float* x,
                         uint64_t stride, float* out) {
    if constexpr (requires { F::kGroupColumns; }) {
        multiply_groups<F, COLUMNS>(panels, num_panels, num_pairs, x, stride, out);
    } else if constexpr (F::kIsInteger) {
        multiply_integers<F, COLUMNS>(panels, num_panels, num_pairs, x, stride, out);
    } else {
        multiply_columns<F, COLUMNS>(panels, num_panels, num_pairs, x, stride, out);
    }
}

template <class F>
void multiply(const uint8_t* panels, int num_panels, uint32_t num_pairs, const float* x,
              uint64_t stride, int num_columns, float* out) {
    switch (padded_columns(num_columns)) {
        case 1: return multiply_columns_of<F, 1>(panels, num_panels, num_pairs, x, stride, out);
        case 2: return multiply_columns_of<F, 2>(panels, num_panels, num_pairs, x, stride, out);
        case 4: return multiply_columns_of<F, 4>(panels, num_panels, num_pairs, x, stride, out);
        default:
            return multiply_columns_of<F, kGroup>(panels, num_panels, num_pairs, x, stride, out);
    }
}

}  // namespace
}  // namespace kccl::engine
