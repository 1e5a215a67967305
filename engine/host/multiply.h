// multiply() for the instruction set that the compiler's flags name. Its struct Vector has kWidth
// rows; kTile says how many sums, of an even and an odd register each, fill the registers. They are
// those of at most kTileColumns columns: a square tile needs the fewest loads.
#pragma once

#include <algorithm>

#include "products.h"
#include "vector.h"

namespace kccl::engine {
namespace {

// Decoding reads weights from memory as fast as it can. So it takes them in the order in which they
// lie, a panel at a time, and asks for them this far ahead. Measured: bench/LOG.md.
constexpr uint64_t kAheadBytes = 8192;

// The sums of a few vectors of rows, all of COLUMNS columns. Decoding asks for weights just ahead.
// With several columns a call reads its panels several times, and meanwhile those of the next call
// come into the L2 cache.
template <int VECTORS, int COLUMNS, bool DECODES>
inline void multiply_tile(const uint16_t* panels, uint64_t elements, uint32_t num_pairs,
                          const float* x, uint64_t stride, float* out) {
    constexpr int kPerPanel = kRows / Vector::kWidth;
    typename Vector::Floats even[VECTORS][COLUMNS], odd[VECTORS][COLUMNS];
    const uint16_t* at[VECTORS];
    KCCL_ENGINE_UNROLL
    for (int v = 0; v < VECTORS; ++v) {
        at[v] = panels + v / kPerPanel * elements + v % kPerPanel * Vector::kWidth * 2;
        KCCL_ENGINE_UNROLL
        for (int c = 0; c < COLUMNS; ++c) even[v][c] = odd[v][c] = Vector::zero();
    }
    for (uint32_t pair = 0; pair < num_pairs; ++pair) {
        KCCL_ENGINE_UNROLL
        for (int v = 0; v < VECTORS; ++v) {
            typename Vector::Floats of_even, of_odd;
            const uint16_t* from = at[v] + uint64_t{pair} * 2 * kRows;
            if (v % kPerPanel == 0) {
                if constexpr (DECODES) {
                    __builtin_prefetch(reinterpret_cast<const uint8_t*>(from) + kAheadBytes);
                } else {
                    __builtin_prefetch(from + kPanels * elements, 0, 2);
                }
            }
            Vector::load(from, &of_even, &of_odd);
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

// In tiles that fill the registers.
template <int COLUMNS>
void multiply_columns(const uint16_t* panels, int num_panels, uint32_t num_pairs, const float* x,
                      uint64_t stride, float* out) {
    constexpr int kColumns = std::min(COLUMNS, Vector::kTileColumns);
    constexpr int kPerPanel = kRows / Vector::kWidth;
    constexpr int kMost = COLUMNS == 1 ? kPerPanel : kPanels * kPerPanel;
    constexpr int kVectors = std::min(Vector::kTile / kColumns, kMost);
    const uint64_t elements = uint64_t{num_pairs} * 2 * kRows;
    const int total = num_panels * kPerPanel;
    // A tile begins where a panel does, or lies within one.
    const auto start = [&](int v) {
        return panels + v / kPerPanel * elements + v % kPerPanel * Vector::kWidth * 2;
    };
    for (int c = 0; c < COLUMNS; c += kColumns) {
        float* to = out + c * kPanels * kRows;
        int v = 0;
        for (; v + kVectors <= total; v += kVectors) {
            multiply_tile<kVectors, kColumns, COLUMNS == 1>(
                start(v), elements, num_pairs, x + c * stride, stride, to + v * Vector::kWidth);
        }
        for (; v < total; ++v) {
            multiply_tile<1, kColumns, COLUMNS == 1>(start(v), elements, num_pairs, x + c * stride,
                                                     stride, to + v * Vector::kWidth);
        }
    }
}

void multiply(const uint16_t* panels, int num_panels, uint32_t num_pairs, const float* x,
              uint64_t stride, int num_columns, float* out) {
    switch (padded_columns(num_columns)) {
        case 1: return multiply_columns<1>(panels, num_panels, num_pairs, x, stride, out);
        case 2: return multiply_columns<2>(panels, num_panels, num_pairs, x, stride, out);
        case 4: return multiply_columns<4>(panels, num_panels, num_pairs, x, stride, out);
        default: return multiply_columns<kGroup>(panels, num_panels, num_pairs, x, stride, out);
    }
}

}  // namespace
}  // namespace kccl::engine
