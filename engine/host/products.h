// Multiplies a matrix by columns of activations, which takes almost all of the time.
//
// A column of activations is the vector of one position. A matrix is cut into panels of 16 rows,
// and a panel into pieces of a few pairs of columns. The matrix's format says what a piece holds
// (formats/table.h). In formats with 16 bits a value, a piece is one pair:
//
//     [pair][row][2]                 64 bytes a pair, rows and columns padded with zeros
//
// One vector register holds 16 rows of a column. A row's sum is a chain of fused multiply-adds for
// even columns and one for odd columns, which are added at the end. It does not depend on how many
// registers, activations or blocks there are. So results have the same bits on every CPU, for one
// position or many, and on any number of ranks. No sum crosses a register.
#pragma once

#include <stdint.h>

#include "digits.h"
#include "formats/table.h"

#if defined(__clang__)
#define KCCL_ENGINE_UNROLL _Pragma("unroll")
#else
#define KCCL_ENGINE_UNROLL _Pragma("GCC unroll 16")
#endif

namespace kccl::engine {

constexpr int kRows = kKcclEnginePanelRows;
// How many columns of activations one call multiplies at most.
constexpr int kGroup = 8;
// How many panels one call multiplies at most.
constexpr int kPanels = 4;

// Returns how many pairs `num_columns` columns make. The last pair may have only one.
inline uint32_t pairs_for(uint32_t num_columns) { return (num_columns + 1) / 2; }

namespace {
// Returns how many bytes a panel has in format F. Each instruction set has its own code of this
// function.
template <class F>
inline uint64_t panel_bytes(uint32_t num_columns) {
    return uint64_t{(pairs_for(num_columns) + F::kPairs - 1) / F::kPairs} * F::kPieceBytes;
}
}  // namespace

// Multiplies `num_panels` panels, at most kPanels, by `num_columns` columns of activations, at most
// kGroup. x: float [columns][2 * num_pairs], where columns is num_columns rounded up to a power of
// two, and columns lie `stride` floats apart. For an integer format x is what the format's Prepare
// made. out: float [columns][kPanels * kRows].
using Multiply = void (*)(const uint8_t* panels, int num_panels, uint32_t num_pairs, const float* x,
                          uint64_t stride, int num_columns, float* out);

#define KCCL_ENGINE_COUNT(FORMAT) +1
constexpr uint32_t kNumFormats = KCCL_ENGINE_FORMATS(KCCL_ENGINE_COUNT);
#undef KCCL_ENGINE_COUNT

// The functions of a format, which the executor finds at run time by the format's number.
// formats/table.h says what they do.
struct FormatOf {
    const char* name;
    uint64_t (*panel_bytes)(uint32_t num_columns);
    uint64_t (*stored_bytes)(uint32_t num_columns);
    void (*pack)(uint8_t* panel, const uint8_t* rows, uint32_t num_rows, uint32_t num_columns);
    void (*widen)(const uint8_t* stored, uint32_t num, float* out);
};
extern const FormatOf kFormats[kNumFormats];

// How many bytes ahead decoding prefetches weights. It is bound by the memory's bandwidth, so it
// reads weights in the order in which they lie, a panel at a time. Measured: bench/LOG.md.
constexpr uint64_t kAheadBytes = 8192;

namespace {
// Prefetches a line of weights that lies behind the one at `from`. DECODES: just ahead of its use.
// Otherwise a call with several columns reads its panels several times, and meanwhile prefetches
// those of the next call into the L2 cache. It is always inline, because gcc takes a function that
// only prefetches for one without any effect, and drops calls of it.
template <bool DECODES>
__attribute__((always_inline)) inline void prefetch(const uint8_t* from, uint64_t panel_bytes) {
    if constexpr (DECODES) {
        __builtin_prefetch(from + kAheadBytes);
    } else {
        __builtin_prefetch(from + kPanels * panel_bytes, 0, 2);
    }
}
}  // namespace

// Turns a column of activations into what an integer format multiplies: DigitGroup [num_columns /
// 32]. num_columns: the columns of the matrix.
using Prepare = void (*)(const float* x, uint32_t num_columns, DigitGroup* to);

// Reads memory as fast as multiplying could read it, and does nothing else. Returns a number made
// of it.
using Touch = uint32_t (*)(const void* from, uint64_t num_bytes);

inline int padded_columns(int num_columns) {
    return num_columns <= 1 ? 1 : num_columns <= 2 ? 2 : num_columns <= 4 ? 4 : kGroup;
}

}  // namespace kccl::engine
