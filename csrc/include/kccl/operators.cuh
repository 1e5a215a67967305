// Operators of reductions, and which types they take.
//
//   operator         types                rule
//   Sum, Prod        all                  integers wrap; boolean: or, and
//   Min, Max         all but complex      NaN if any input is NaN; -0 is below +0
//   Avg              floats, complex      the sum divided by the world size in the accumulator; it
//                                         is infinite where that sum is
//   Band, Bor, Bxor  integers, boolean    bit by bit
//
// A product of complex numbers goes in rank order too, each part by two products and one sum:
//
//   re = a.re * b.re - a.im * b.im        im = a.re * b.im + a.im * b.re
//
// Each of these products is rounded by itself, so none is fused with the sum.
#pragma once

#include "types.cuh"

namespace kccl {

// An operator. A reduction calls apply(accumulated, next) in rank order, then finish(accumulated,
// world_size). kIsTold: the operator is constructed from the host's call, because some of its facts
// are known at run time only. kReduces: it has its own reduce_unit() and reduce_rows(), see
// reduce.cuh.
struct Sum {
    static constexpr bool kIsTold = false;
    static constexpr bool kReduces = false;

    template <class T, class Acc>
    KCCL_DEVICE static Acc apply(Acc a, Acc b) {
        if constexpr (kKindOf<T> == Kind::kComplex) {
            return {a.re + b.re, a.im + b.im};
        } else if constexpr (kKindOf<T> == Kind::kBool) {
            return a | b;
        } else {
            return static_cast<Acc>(a + b);
        }
    }
    template <class Acc>
    KCCL_DEVICE static Acc finish(Acc a, int) {
        return a;
    }
};

struct Prod : Sum {
    template <class T, class Acc>
    KCCL_DEVICE static Acc apply(Acc a, Acc b) {
        if constexpr (kKindOf<T> == Kind::kComplex) {
            return {mem::product(a.re, b.re) - mem::product(a.im, b.im),
                    mem::product(a.re, b.im) + mem::product(a.im, b.re)};
        } else if constexpr (kKindOf<T> == Kind::kBool) {
            return a & b;
        } else if constexpr (sizeof(Acc) < sizeof(uint32_t)) {
            // C++ would multiply them as signed ints, whose overflow is undefined.
            return static_cast<Acc>(uint32_t{a} * uint32_t{b});
        } else {
            return a * b;
        }
    }
};

struct Avg : Sum {
    template <class T, class Acc>
    KCCL_DEVICE static Acc apply(Acc a, Acc b) {
        static_assert(kHasNan<T>, "avg is for floats and complex numbers");
        return Sum::apply<T>(a, b);
    }
    template <class Acc>
    KCCL_DEVICE static Acc finish(Acc a, int world_size) {
        return a / static_cast<Acc>(world_size);
    }
    template <class Real>
    KCCL_DEVICE static Complex<Real> finish(Complex<Real> a, int world_size) {
        return {finish(a.re, world_size), finish(a.im, world_size)};
    }
};

// Floats that compare equal differ at most in the sign of zero. Here an or of their bits keeps a
// minus; in Max an and keeps a plus.
struct Min : Sum {
    template <class T, class Acc>
    KCCL_DEVICE static Acc apply(Acc a, Acc b) {
        static_assert(kKindOf<T> != Kind::kComplex, "complex numbers have no order");
        if constexpr (kKindOf<T> == Kind::kFloat) {
            using Bits = typename Element<T>::Bits;
            const Acc zero =
                platform::bit_cast<Acc>(platform::bit_cast<Bits>(a) | platform::bit_cast<Bits>(b));
            const Acc ordered = a < b ? a : b < a ? b : zero;
            return a != a ? a : b != b ? b : ordered;
        } else if constexpr (kKindOf<T> == Kind::kSigned) {
            return static_cast<T>(b) < static_cast<T>(a) ? b : a;
        } else {
            return b < a ? b : a;
        }
    }
};

struct Max : Sum {
    template <class T, class Acc>
    KCCL_DEVICE static Acc apply(Acc a, Acc b) {
        static_assert(kKindOf<T> != Kind::kComplex, "complex numbers have no order");
        if constexpr (kKindOf<T> == Kind::kFloat) {
            using Bits = typename Element<T>::Bits;
            const Acc zero =
                platform::bit_cast<Acc>(platform::bit_cast<Bits>(a) & platform::bit_cast<Bits>(b));
            const Acc ordered = a < b ? b : b < a ? a : zero;
            return a != a ? a : b != b ? b : ordered;
        } else if constexpr (kKindOf<T> == Kind::kSigned) {
            return static_cast<T>(a) < static_cast<T>(b) ? b : a;
        } else {
            return a < b ? b : a;
        }
    }
};

template <class T>
constexpr bool kHasBits = kIsInteger<T> || kKindOf<T> == Kind::kBool;

struct Band : Sum {
    template <class T, class Acc>
    KCCL_DEVICE static Acc apply(Acc a, Acc b) {
        static_assert(kHasBits<T>, "bitwise operators are for integers and boolean");
        return a & b;
    }
};

struct Bor : Sum {
    template <class T, class Acc>
    KCCL_DEVICE static Acc apply(Acc a, Acc b) {
        static_assert(kHasBits<T>, "bitwise operators are for integers and boolean");
        return a | b;
    }
};

struct Bxor : Sum {
    template <class T, class Acc>
    KCCL_DEVICE static Acc apply(Acc a, Acc b) {
        static_assert(kHasBits<T>, "bitwise operators are for integers and boolean");
        return a ^ b;
    }
};

// The KcclOp of Op; kKcclNumOps for void and for a user's own operator.
template <class Op>
constexpr uint32_t kOpOf = kKcclNumOps;
template <>
inline constexpr uint32_t kOpOf<Sum> = kKcclSum;
template <>
inline constexpr uint32_t kOpOf<Prod> = kKcclProd;
template <>
inline constexpr uint32_t kOpOf<Min> = kKcclMin;
template <>
inline constexpr uint32_t kOpOf<Max> = kKcclMax;
template <>
inline constexpr uint32_t kOpOf<Avg> = kKcclAvg;
template <>
inline constexpr uint32_t kOpOf<Band> = kKcclBand;
template <>
inline constexpr uint32_t kOpOf<Bor> = kKcclBor;
template <>
inline constexpr uint32_t kOpOf<Bxor> = kKcclBxor;

// Tells whether an operator takes elements of T, as in the table above. A user's own operator takes
// every type.
template <class Op, class T>
constexpr bool kTakes =
    kKindOf<T> != Kind::kNone &&
    (kOpOf<Op> == kKcclAvg                              ? kHasNan<T>
     : kOpOf<Op> == kKcclMin || kOpOf<Op> == kKcclMax   ? kKindOf<T> != Kind::kComplex
     : kOpOf<Op> >= kKcclBand && kOpOf<Op> <= kKcclBxor ? kHasBits<T>
                                                        : true);

// Refuses, at compile time and in one sentence, a call whose operator does not take T. The caller
// instantiates nothing else with these types.
template <class Op, class T>
KCCL_DEVICE Status refuse_types() {
    static_assert(
        kKindOf<T> != Kind::kNone,
        "reductions take float, double, int8_t to int64_t, uint8_t to uint64_t, kccl::f16, "
        "bf16, f8e4m3, f8e5m2, boolean, complex64 and complex128");
    static_assert(kKindOf<T> == Kind::kNone || kTakes<Op, T>,
                  "Avg takes floats and complex numbers; Min and Max no complex numbers; Band, Bor "
                  "and Bxor integers and boolean");
    return kKcclBadArgument;
}

// Returns the operator of a call that the host launches.
template <class Op>
KCCL_DEVICE Op operator_of([[maybe_unused]] const Call& call) {
    if constexpr (Op::kIsTold) {
        return Op(call);
    } else {
        return Op{};
    }
}

}  // namespace kccl
