// Reductions of payloads and of rows. Every reduction goes in rank order 0, 1, 2, ... with one
// accumulator, and rounds it to the element type at the end. So the bits of its result depend on
// the inputs only: not on rank, algorithm, length or target. types.cuh has the accumulators,
// operators.cuh the operators.
#pragma once

#include "operators.cuh"
#include "payload.cuh"

namespace kccl {

// Rounds the accumulators of a unit (one payload, or the two payloads of a long element, see
// payload.cuh) to elements of T. Elements of 16 bits are rounded in pairs. If one of them is NaN,
// which is rare, all are rounded again one by one, because narrow_pair() takes no NaN.
template <class T, int N, uint32_t WORDS>
KCCL_DEVICE void narrow_unit(uint64_t (&unit)[WORDS], const typename Element<T>::Acc (&acc)[N]) {
    if constexpr (kNarrowsPairs<T>) {
        uint32_t pairs[N / 2];
        bool are_numbers = true;
        for (int k = 0; k < N; k += 2) {
            pairs[k / 2] = Element<T>::narrow_pair(acc[k], acc[k + 1]);
            are_numbers &= acc[k] == acc[k];
            are_numbers &= acc[k + 1] == acc[k + 1];
        }
        platform::copy_bytes(unit, pairs, sizeof(unit));
        if (are_numbers) return;
    }
    T elements[N];
    for (int k = 0; k < N; ++k) elements[k] = Element<T>::narrow(acc[k]);
    platform::copy_bytes(unit, elements, sizeof(unit));
}

// Reduces element-wise one unit of each rank 0 .. world_size - 1: a payload, or the two payloads of
// a longer element. The units lie `stride` payloads apart in an array with room for MAX_RANKS.
template <class T, class Op, int MAX_RANKS>
KCCL_DEVICE void reduce_unit(uint64_t (&result)[kUnitPayloads<T>], const uint64_t* payloads,
                             int stride, int world_size, [[maybe_unused]] const Op& op = Op{}) {
    if constexpr (Op::kReduces) {
        op.template reduce_unit<MAX_RANKS>(result, payloads, stride, world_size);
    } else {
        constexpr int kCount = kUnitElements<T>;
        typename Element<T>::Acc acc[kCount];
        T elements[kCount];
        platform::copy_bytes(elements, &payloads[0], sizeof(result));
        for (int k = 0; k < kCount; ++k) acc[k] = Element<T>::widen(elements[k]);
        KCCL_UNROLL
        for (int rank = 1; rank < MAX_RANKS; ++rank) {
            if (rank >= world_size) break;
            platform::copy_bytes(elements, &payloads[rank * stride], sizeof(result));
            for (int k = 0; k < kCount; ++k) {
                acc[k] = Op::template apply<T>(acc[k], Element<T>::widen(elements[k]));
            }
        }
        for (int k = 0; k < kCount; ++k) acc[k] = Op::finish(acc[k], world_size);
        narrow_unit<T>(result, acc);
    }
}

// Reduces one payload of each rank. Elements of T have at most 8 bytes.
template <class T, class Op, int STRIDE, int MAX_RANKS>
KCCL_DEVICE uint64_t reduce_payloads(const uint64_t* payloads, int world_size,
                                     const Op& op = Op{}) {
    static_assert(kUnitPayloads<T> == 1, "an element is longer than a payload");
    uint64_t result[1];
    reduce_unit<T, Op, MAX_RANKS>(result, payloads, STRIDE, world_size, op);
    return result[0];
}

// Reduces N payloads of each rank, which are whole units.
template <class T, class Op, int MAX_RANKS, uint32_t N>
KCCL_DEVICE void reduce_packets(uint64_t (&results)[N], const uint64_t (&payloads)[MAX_RANKS][N],
                                int world_size, const Op& op = Op{}) {
    constexpr uint32_t kUnit = kUnitPayloads<T>;
    static_assert(N % kUnit == 0, "no element is cut");
    for (uint32_t n = 0; n < N; n += kUnit) {
        uint64_t result[kUnit];
        reduce_unit<T, Op, MAX_RANKS>(result, &payloads[0][n], N, world_size, op);
        for (uint32_t k = 0; k < kUnit; ++k) results[n + k] = result[k];
    }
}

// The number of lines of 16 bytes that a thread loads from each row before it reduces any. It holds
// these lines in registers, so with more than four ranks, or an unknown number (WORLD_SIZE 0), it
// loads only one from each row.
template <int WORLD_SIZE>
constexpr uint32_t kLinesAtOnce = WORLD_SIZE > 0 && WORLD_SIZE <= 4 ? 2 : 1;

// Reduces one row of each rank, `count` elements each, and stores the result into num_outs rows.
// Does the share of thread `index` of `size`. row_of(rank) returns a rank's row, and out_of(k) the
// k-th result row. A result row is an input row or overlaps none.
template <class T, class Op, int WORLD_SIZE, class RowOf, class OutOf>
KCCL_DEVICE void reduce_lines(uint32_t index, uint32_t size, uint32_t count, int world_size,
                              RowOf row_of, int num_outs, OutOf out_of, const Op& op = Op{}) {
    constexpr int kRanks = kMaxRanks<WORLD_SIZE>;
    constexpr uint32_t kPayloads = 2;
    constexpr uint32_t kElements = kPayloads * kPayloadBytes / sizeof(T);
    constexpr uint32_t kAtOnce = kLinesAtOnce<WORLD_SIZE>;
    const T* rows[kRanks];
    T* outs[kRanks];
    KCCL_UNROLL
    for (int rank = 0; rank < kRanks; ++rank) {
        if (rank < world_size) rows[rank] = row_of(rank);
    }
    KCCL_UNROLL
    for (int k = 0; k < kRanks; ++k) {
        if (k < num_outs) outs[k] = out_of(k);
    }
    for (uint32_t first = index; first * kElements < count; first += kAtOnce * size) {
        uint64_t payloads[kAtOnce][kRanks][kPayloads];
        KCCL_UNROLL
        for (uint32_t n = 0; n < kAtOnce; ++n) {
            KCCL_UNROLL
            for (int rank = 0; rank < kRanks; ++rank) {
                if (rank >= world_size) break;
                load_payloads(payloads[n][rank], rows[rank], kPayloads * (first + n * size), count);
            }
        }
        KCCL_UNROLL
        for (uint32_t n = 0; n < kAtOnce; ++n) {
            uint64_t results[kPayloads];
            reduce_packets<T, Op>(results, payloads[n], world_size, op);
            KCCL_UNROLL
            for (int k = 0; k < kRanks; ++k) {
                if (k >= num_outs) break;
                store_payloads(outs[k], kPayloads * (first + n * size), count, results);
            }
        }
    }
}

template <class T, class Op, int WORLD_SIZE, class Coop>
KCCL_DEVICE void reduce_rows_of(Coop coop, T* out, const T* const* rows, uint64_t count) {
    const T* row[WORLD_SIZE];
    for (int rank = 0; rank < WORLD_SIZE; ++rank) row[rank] = rows[rank];
    KCCL_INDEPENDENT
    for (uint64_t i = coop.index(); i < count; i += coop.size()) {
        typename Element<T>::Acc acc = Element<T>::widen(mem::load_plain(row[0] + i));
        for (int rank = 1; rank < WORLD_SIZE; ++rank) {
            acc = Op::template apply<T>(acc, Element<T>::widen(mem::load_plain(row[rank] + i)));
        }
        mem::store_plain(out + i, Element<T>::narrow(Op::finish(acc, WORLD_SIZE)));
    }
}

// Sets out[i] to the reduction of rows[0][i], rows[1][i], ... for i < count. `out` may be one of
// the rows. Called by all threads of the coop (a thread, warp or block: coop.cuh). Each world size
// has a loop of its own, in which the size is a constant, so that compilers for CPUs make vector
// code.
template <class T, class Op, class Coop>
KCCL_DEVICE_SHARED void reduce_rows(Coop coop, T* out, const T* const* rows, int world_size,
                                    uint64_t count, [[maybe_unused]] const Op& op = Op{}) {
    [[maybe_unused]] const platform::DefaultFloats floats{};
    if constexpr (Op::kReduces) {
        op.reduce_rows(out, rows, world_size, count);
    } else {
        static_assert(kKcclMaxWorldSize == 8, "a case for each number of rows");
        switch (world_size) {
            case 1: return reduce_rows_of<T, Op, 1>(coop, out, rows, count);
            case 2: return reduce_rows_of<T, Op, 2>(coop, out, rows, count);
            case 3: return reduce_rows_of<T, Op, 3>(coop, out, rows, count);
            case 4: return reduce_rows_of<T, Op, 4>(coop, out, rows, count);
            case 5: return reduce_rows_of<T, Op, 5>(coop, out, rows, count);
            case 6: return reduce_rows_of<T, Op, 6>(coop, out, rows, count);
            case 7: return reduce_rows_of<T, Op, 7>(coop, out, rows, count);
            default: return reduce_rows_of<T, Op, kKcclMaxWorldSize>(coop, out, rows, count);
        }
    }
}

}  // namespace kccl
