// Element types and operators. Every reduction goes in rank order 0, 1, 2, ... with one accumulator
// and rounds once. So the bits of its result depend on the inputs only: not on rank, algorithm,
// length or target.
//
//   accumulator   float for float, half and bfloat16; double for double; wrapping integers
//   NaN           if any input is NaN, the result is the canonical quiet NaN
//   min, max      -0 is below +0
//   avg           the sum divided by the world size in the accumulator; floats only
#pragma once

#include "payload.cuh"

namespace kccl {

struct f16 {
    uint16_t bits;
};
struct bf16 {
    uint16_t bits;
};

// The KcclDtype of T, and the KcclOp of Op; the number of them for other types.
template <class T>
constexpr uint32_t kDtypeOf = kKcclNumDtypes;
template <>
constexpr uint32_t kDtypeOf<float> = kKcclFloat32;
template <>
constexpr uint32_t kDtypeOf<double> = kKcclFloat64;
template <>
constexpr uint32_t kDtypeOf<f16> = kKcclFloat16;
template <>
constexpr uint32_t kDtypeOf<bf16> = kKcclBfloat16;
template <>
constexpr uint32_t kDtypeOf<int32_t> = kKcclInt32;
template <>
constexpr uint32_t kDtypeOf<int64_t> = kKcclInt64;
template <class Op>
constexpr uint32_t kOpOf = kKcclNumOps;
template <>
constexpr uint32_t kOpOf<struct Sum> = kKcclSum;
template <>
constexpr uint32_t kOpOf<struct Prod> = kKcclProd;
template <>
constexpr uint32_t kOpOf<struct Min> = kKcclMin;
template <>
constexpr uint32_t kOpOf<struct Max> = kKcclMax;
template <>
constexpr uint32_t kOpOf<struct Avg> = kKcclAvg;

// Element<T>: Acc, the accumulator; widen(T) -> Acc; narrow(Acc) -> T, which canonicalises NaN.
// Types of 16 bits also have narrow_pair(): the bits of two elements that are not NaN.
template <class T>
struct Element;

template <>
struct Element<float> {
    using Acc = float;
    using Bits = uint32_t;
    KCCL_DEVICE static Acc widen(float value) { return value; }
    KCCL_DEVICE static float narrow(Acc acc) {
        return acc != acc ? platform::bit_cast<float>(0x7fc00000u) : acc;
    }
};

template <>
struct Element<double> {
    using Acc = double;
    using Bits = uint64_t;
    KCCL_DEVICE static Acc widen(double value) { return value; }
    KCCL_DEVICE static double narrow(Acc acc) {
        return acc != acc ? platform::bit_cast<double>(uint64_t{0x7ff8000000000000u}) : acc;
    }
};

template <>
struct Element<f16> {
    using Acc = float;
    using Bits = uint32_t;
    KCCL_DEVICE static Acc widen(f16 value) { return mem::float_from_half(value.bits); }
    KCCL_DEVICE static f16 narrow(Acc acc) {
        return {acc != acc ? uint16_t{0x7e00} : mem::half_from_float(acc)};
    }
    KCCL_DEVICE static uint32_t narrow_pair(Acc first, Acc second) {
        return mem::halves_from_floats(first, second);
    }
};

template <>
struct Element<bf16> {
    using Acc = float;
    using Bits = uint32_t;
    KCCL_DEVICE static Acc widen(bf16 value) {
        return platform::bit_cast<float>(static_cast<uint32_t>(value.bits) << 16);
    }
    KCCL_DEVICE static bf16 narrow(Acc acc) {
        return {acc != acc ? uint16_t{0x7fc0} : mem::bfloat16_from_float(acc)};
    }
    KCCL_DEVICE static uint32_t narrow_pair(Acc first, Acc second) {
        return mem::bfloat16s_from_floats(first, second);
    }
};

// Unsigned accumulators: signed overflow is undefined, unsigned wraps.
template <>
struct Element<int32_t> {
    using Acc = uint32_t;
    using Signed = int32_t;
    KCCL_DEVICE static Acc widen(int32_t value) { return static_cast<uint32_t>(value); }
    KCCL_DEVICE static int32_t narrow(Acc acc) { return static_cast<int32_t>(acc); }
};

template <>
struct Element<int64_t> {
    using Acc = uint64_t;
    using Signed = int64_t;
    KCCL_DEVICE static Acc widen(int64_t value) { return static_cast<uint64_t>(value); }
    KCCL_DEVICE static int64_t narrow(Acc acc) { return static_cast<int64_t>(acc); }
};

template <class T>
constexpr bool kIsInteger = false;
template <>
inline constexpr bool kIsInteger<int32_t> = true;
template <>
inline constexpr bool kIsInteger<int64_t> = true;

// An operator: apply(accumulated, next) in rank order, then finish(accumulated, world_size).
struct Sum {
    template <class T, class Acc>
    KCCL_DEVICE static Acc apply(Acc a, Acc b) {
        return a + b;
    }
    template <class Acc>
    KCCL_DEVICE static Acc finish(Acc a, int) {
        return a;
    }
};

struct Prod : Sum {
    template <class T, class Acc>
    KCCL_DEVICE static Acc apply(Acc a, Acc b) {
        return a * b;
    }
};

struct Avg : Sum {
    template <class Acc>
    KCCL_DEVICE static Acc finish(Acc a, int world_size) {
        return a / static_cast<Acc>(world_size);
    }
};

// Equal floats differ at most in the sign of zero. Or-ing the bits keeps a minus; and-ing (in Max)
// keeps a plus.
struct Min : Sum {
    template <class T, class Acc>
    KCCL_DEVICE static Acc apply(Acc a, Acc b) {
        if constexpr (kIsInteger<T>) {
            using Signed = typename Element<T>::Signed;
            return static_cast<Signed>(b) < static_cast<Signed>(a) ? b : a;
        } else {
            using Bits = typename Element<T>::Bits;
            const Acc zero =
                platform::bit_cast<Acc>(platform::bit_cast<Bits>(a) | platform::bit_cast<Bits>(b));
            const Acc ordered = a < b ? a : b < a ? b : zero;
            return a != a ? a : b != b ? b : ordered;
        }
    }
};

struct Max : Sum {
    template <class T, class Acc>
    KCCL_DEVICE static Acc apply(Acc a, Acc b) {
        if constexpr (kIsInteger<T>) {
            using Signed = typename Element<T>::Signed;
            return static_cast<Signed>(a) < static_cast<Signed>(b) ? b : a;
        } else {
            using Bits = typename Element<T>::Bits;
            const Acc zero =
                platform::bit_cast<Acc>(platform::bit_cast<Bits>(a) & platform::bit_cast<Bits>(b));
            const Acc ordered = a < b ? b : b < a ? a : zero;
            return a != a ? a : b != b ? b : ordered;
        }
    }
};

// Narrows the elements of a payload. Elements of 16 bits are narrowed in pairs unless there is a
// NaN, which is rare.
template <class T, int N>
KCCL_DEVICE uint64_t narrow_payload(const typename Element<T>::Acc (&acc)[N]) {
    uint64_t payload;
    if constexpr (sizeof(T) == 2) {
        uint32_t pairs[N / 2];
        bool are_numbers = true;
        for (int k = 0; k < N; k += 2) {
            pairs[k / 2] = Element<T>::narrow_pair(acc[k], acc[k + 1]);
            are_numbers &= acc[k] == acc[k];
            are_numbers &= acc[k + 1] == acc[k + 1];
        }
        platform::copy_bytes(&payload, pairs, sizeof(payload));
        if (are_numbers) return payload;
    }
    T elements[N];
    for (int k = 0; k < N; ++k) elements[k] = Element<T>::narrow(acc[k]);
    platform::copy_bytes(&payload, elements, sizeof(payload));
    return payload;
}

// Reduces element-wise one 8-byte payload of each rank 0 .. world_size - 1. They lie STRIDE apart
// in an array with room for MAX_RANKS.
template <class T, class Op, int STRIDE, int MAX_RANKS>
KCCL_DEVICE uint64_t reduce_payloads(const uint64_t* payloads, int world_size) {
    constexpr int kCount = 8 / sizeof(T);
    typename Element<T>::Acc acc[kCount];
    T elements[kCount];
    platform::copy_bytes(elements, &payloads[0], 8);
    for (int k = 0; k < kCount; ++k) acc[k] = Element<T>::widen(elements[k]);
    KCCL_UNROLL
    for (int rank = 1; rank < MAX_RANKS; ++rank) {
        if (rank >= world_size) break;
        platform::copy_bytes(elements, &payloads[rank * STRIDE], 8);
        for (int k = 0; k < kCount; ++k) {
            acc[k] = Op::template apply<T>(acc[k], Element<T>::widen(elements[k]));
        }
    }
    for (int k = 0; k < kCount; ++k) acc[k] = Op::finish(acc[k], world_size);
    return narrow_payload<T>(acc);
}

template <class T, class Op, int MAX_RANKS>
KCCL_DEVICE uint64_t reduce_payloads(const uint64_t (&payloads)[MAX_RANKS], int world_size) {
    return reduce_payloads<T, Op, 1, MAX_RANKS>(payloads, world_size);
}

// Reduces N payloads of each rank.
template <class T, class Op, int MAX_RANKS, uint32_t N>
KCCL_DEVICE void reduce_packets(uint64_t (&results)[N], const uint64_t (&payloads)[MAX_RANKS][N],
                                int world_size) {
    for (uint32_t n = 0; n < N; ++n) {
        results[n] = reduce_payloads<T, Op, N, MAX_RANKS>(&payloads[0][n], world_size);
    }
}

// How many lines of 16 bytes a thread loads from each row before it reduces any, as its registers
// allow.
template <int WORLD_SIZE>
constexpr uint32_t kLinesAtOnce = WORLD_SIZE > 0 && WORLD_SIZE <= 4 ? 2 : 1;

// Reduces one row of each rank, `count` elements each, and stores the result into num_outs rows.
// Does the share of thread `index` of `size`. row_of(rank) -> const T*; out_of(k) -> T*. A result
// row is an input row or overlaps none.
template <class T, class Op, int WORLD_SIZE, class RowOf, class OutOf>
KCCL_DEVICE void reduce_lines(uint32_t index, uint32_t size, uint32_t count, int world_size,
                              RowOf row_of, int num_outs, OutOf out_of) {
    constexpr int kRanks = kMaxRanks<WORLD_SIZE>;
    constexpr uint32_t kPayloads = 2;
    constexpr uint32_t kElements = kPayloads * kPayloadElements<T>;
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
            reduce_packets<T, Op>(results, payloads[n], world_size);
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

// out[i] = the reduction of rows[0][i], rows[1][i], ... for i < count. `out` may be one of the
// rows. Called by all threads of the coop. The world size is a constant in each loop, so that a
// CPU's compiler makes vector code of it.
template <class T, class Op, class Coop>
KCCL_DEVICE_SHARED void reduce_rows(Coop coop, T* out, const T* const* rows, int world_size,
                                    uint64_t count) {
    [[maybe_unused]] const platform::DefaultFloats floats{};
    switch (world_size) {
        case 1: return reduce_rows_of<T, Op, 1>(coop, out, rows, count);
        case 2: return reduce_rows_of<T, Op, 2>(coop, out, rows, count);
        case 3: return reduce_rows_of<T, Op, 3>(coop, out, rows, count);
        case 4: return reduce_rows_of<T, Op, 4>(coop, out, rows, count);
        case 5: return reduce_rows_of<T, Op, 5>(coop, out, rows, count);
        case 6: return reduce_rows_of<T, Op, 6>(coop, out, rows, count);
        case 7: return reduce_rows_of<T, Op, 7>(coop, out, rows, count);
        default: return reduce_rows_of<T, Op, 8>(coop, out, rows, count);
    }
}

}  // namespace kccl
