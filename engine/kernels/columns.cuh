// Columns: a token step runs up to S::kColumns neighbouring positions of a request at the same
// time, each in a column; with seats (seats.cuh), positions of different requests. All of them use
// the same weights, which are read once. Column 0 has the first position. A token step uses the
// columns from 0 on, and all blocks of all ranks know how many.
//
// The matrix unit multiplies several vectors by a tile, and a vector's sums do not depend on the
// others. So the bits of a column depend neither on the other columns nor on their number.
//
// Threads share the rows of all columns: what a thread finishes is a float4 of a column.
#pragma once

#include "exchange_buffer.cuh"
#include "seats.cuh"

namespace kccl::decode {

// Whether a thread has few registers, because the block has many warps. Then fewer queries share a
// tile, so that fewer registers are spilled. The code of a layer is shorter then, too, and a token
// step of several columns takes less time (bench/LOG.md).
template <class S>
constexpr bool kHasFewRegisters = S::kWarps > 6;

// How the columns' queries share a tile of keys and values in attention (attend_columns.cuh).
template <class S>
struct Columns {
    // Returns how many columns a warp multiplies with a tile at the same time: with more, its
    // threads would hold too many sums of the head. With seats each has keys and values of its own.
    KCCL_CONSTEXPR static uint32_t together() {
        constexpr uint32_t kHeads = Shape<S>::kHeadsPerKv;
        constexpr uint32_t kMostQueries = kHasFewRegisters<S> ? 4 : 8;
        constexpr uint32_t kMostTiles = kHasFewRegisters<S> ? 6 : 12;
        uint32_t most = 1;
        while (!S::kHasSeats && most < S::kColumns && (most + 1) * kHeads <= kMostQueries &&
               ceil_div((most + 1) * kHeads, Mma<f16>::kVectors) * Shape<S>::kHeadTilesOfDim <=
                   kMostTiles) {
            ++most;
        }
        return most;
    }
    static constexpr uint32_t kTogether = together();
    static constexpr uint32_t kGroups = ceil_div(S::kColumns, kTogether);
    static constexpr uint32_t kQueries = kGroups * kTogether * Shape<S>::kHeadsPerKv;
};

// Whether one thread of a warp, the scout, polls alone at first (Waiter::await). A kernel with
// several columns has no scouts if a thread has only one float4 of a vector. There the scout's
// additional trip to the L2 cache would take longer than it saves (bench/LOG.md).
template <class S>
constexpr bool kScouts = S::kColumns == 1 || Shape<S>::OfResidual::kFloat4s > platform::kWarpSize;

// Returns for how many columns a thread waits at the same time, if it has `each` float4s of each
// column. More would take too many registers.
template <class S>
KCCL_CONSTEXPR uint32_t columns_at_once(uint32_t each) {
    constexpr uint32_t kMost = 8;
    const uint32_t fit = each < kMost ? kMost / each : 1;
    return ceil_div(S::kColumns, ceil_div(S::kColumns, fit));
}

// Returns how many columns the token step uses that begins with `position`, unless it has drafts. A
// prompt's positions run as many at a time as there are columns.
template <class S>
KCCL_DECODE uint32_t columns_of(const Task& task, uint32_t position) {
    if constexpr (S::kColumns == 1) return 1;
    if constexpr (S::kHasSeats) return task.num_seats;
    const uint32_t rest = position < task.num_ids ? task.num_ids - position : 1;
    return rest < S::kColumns ? rest : S::kColumns;
}

// ---- Tags ---------------------------------------------------------------------------------------

// How many token steps have used each column, modulo 4: the number of column c has bit c of `low`,
// and above it bit c of `high`. The bits kMergedUse count the token steps of kernels with several
// columns, as if these were one more column. The bit kMeanUse of `low` counts those whose blocks
// shared the head's mean (head_mean.cuh).
struct Uses {
    uint32_t low;
    uint32_t high;
};

// Uses as a word, for the host to keep between requests (KcclDecodeTask.uses).
constexpr uint32_t kUsesBits = 16, kMergedUse = kUsesBits - 1, kMeanUse = kMergedUse - 1;
KCCL_DECODE Uses uses_of(uint32_t word) {
    return {word & ((1u << kUsesBits) - 1), word >> kUsesBits};
}
KCCL_DECODE uint32_t word_of(const Uses& uses) { return uses.low | uses.high << kUsesBits; }

// Counts a token step that used the first `num` columns.
KCCL_DECODE void count_step(Uses* uses, uint32_t num) {
    const uint32_t used = (1u << num) - 1;
    const uint32_t counted = used | 1u << kMergedUse;
    uses->high ^= uses->low & counted;
    uses->low ^= counted;
}

// The tags of a thread's float4s, EACH of each column: bit i is that of the i-th column.
template <uint32_t EACH>
struct ColumnTags {
    uint32_t bits;
};

// Returns the tag of a thread's i-th float4. Bits above the lowest one mean nothing.
KCCL_DECODE uint32_t tag_at(uint32_t tag, uint32_t) { return tag; }
template <uint32_t EACH>
KCCL_DECODE uint32_t tag_at(const ColumnTags<EACH>& tags, uint32_t i) {
    return tags.bits >> i / EACH;
}

}  // namespace kccl::decode
