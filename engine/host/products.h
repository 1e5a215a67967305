// The product of a matrix with columns of activations: what almost all of the time goes into.
//
// A matrix is cut into panels of 16 rows. A panel holds pairs of columns:
//
//     bf16 [pair][row][2]            64 bytes a pair, rows and columns padded with zeros
//
// One vector register holds 16 rows of a column, so a row's sum is a chain of fused multiply-adds,
// one chain for even columns and one for odd ones, added at the end. It does not depend on how many
// registers, activations or blocks there are: results are the same bits on every CPU, for one
// position or many, and on any number of ranks. No sum crosses a register.
#pragma once

#include <stdint.h>

#include "api.h"

#if defined(__clang__)
#define KCCL_ENGINE_UNROLL _Pragma("unroll")
#else
#define KCCL_ENGINE_UNROLL _Pragma("GCC unroll 16")
#endif

namespace kccl::engine {

constexpr int kRows = kKcclEnginePanelRows;
// Columns of activations that one call multiplies, at most.
constexpr int kGroup = 8;
// Panels that one call multiplies, at most.
constexpr int kPanels = 4;

// Elements of a panel.
inline uint64_t panel_elements(uint32_t num_columns) {
    return uint64_t{(num_columns + 1) / 2} * 2 * kRows;
}

// Multiplies `num_panels` panels, at most kPanels, with `num_columns` columns of activations, at
// most kGroup. x: float [columns][2 * num_pairs], where columns is num_columns rounded up to a
// power of two, `stride` floats apart. out: float [columns][kPanels * kRows].
using Multiply = void (*)(const uint16_t* panels, int num_panels, uint32_t num_pairs,
                          const float* x, uint64_t stride, int num_columns, float* out);

// Reads memory and does nothing else, as fast as multiplying could.
using Touch = uint32_t (*)(const void* from, uint64_t num_bytes);

inline int padded_columns(int num_columns) {
    return num_columns <= 1 ? 1 : num_columns <= 2 ? 2 : num_columns <= 4 ? 4 : kGroup;
}

}  // namespace kccl::engine
