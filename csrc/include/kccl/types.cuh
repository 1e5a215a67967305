// Element types, and what a reduction accumulates them in.
//
//   type                        accumulator
//   float, f16, bf16, float8    float
//   double                      double
//   integers                    the unsigned type of the same size, which wraps
//   boolean                     a byte, 0 or 1; every other byte counts as 1
//   complex                     two floats, or two doubles
//
// A result that is NaN is the canonical quiet NaN; in a complex number, each part by itself.
#pragma once

#include "float8.cuh"

namespace kccl {

struct f16 {
    uint16_t bits;
};
struct bf16 {
    uint16_t bits;
};
struct f8e4m3 {
    uint8_t bits;
};
struct f8e5m2 {
    uint8_t bits;
};
struct boolean {
    uint8_t bits;
};

template <class Real>
struct Complex {
    Real re, im;
};
using complex64 = Complex<float>;
using complex128 = Complex<double>;

enum class Kind { kNone, kFloat, kSigned, kUnsigned, kBool, kComplex };

// Facts about a type: its KcclDtype, or kKcclNumDtypes if it has none, and its kind.
template <KcclDtype DTYPE, Kind KIND>
struct TypeFacts {
    static constexpr uint32_t kDtype = DTYPE;
    static constexpr Kind kKind = KIND;
};
template <class T>
struct FactsOf : TypeFacts<kKcclNumDtypes, Kind::kNone> {};
template <>
struct FactsOf<float> : TypeFacts<kKcclFloat32, Kind::kFloat> {};
template <>
struct FactsOf<double> : TypeFacts<kKcclFloat64, Kind::kFloat> {};
template <>
struct FactsOf<f16> : TypeFacts<kKcclFloat16, Kind::kFloat> {};
template <>
struct FactsOf<bf16> : TypeFacts<kKcclBfloat16, Kind::kFloat> {};
template <>
struct FactsOf<f8e4m3> : TypeFacts<kKcclFloat8E4m3fn, Kind::kFloat> {};
template <>
struct FactsOf<f8e5m2> : TypeFacts<kKcclFloat8E5m2, Kind::kFloat> {};
template <>
struct FactsOf<int8_t> : TypeFacts<kKcclInt8, Kind::kSigned> {};
template <>
struct FactsOf<int16_t> : TypeFacts<kKcclInt16, Kind::kSigned> {};
template <>
struct FactsOf<int32_t> : TypeFacts<kKcclInt32, Kind::kSigned> {};
template <>
struct FactsOf<int64_t> : TypeFacts<kKcclInt64, Kind::kSigned> {};
template <>
struct FactsOf<uint8_t> : TypeFacts<kKcclUint8, Kind::kUnsigned> {};
template <>
struct FactsOf<uint16_t> : TypeFacts<kKcclUint16, Kind::kUnsigned> {};
template <>
struct FactsOf<uint32_t> : TypeFacts<kKcclUint32, Kind::kUnsigned> {};
template <>
struct FactsOf<uint64_t> : TypeFacts<kKcclUint64, Kind::kUnsigned> {};
template <>
struct FactsOf<boolean> : TypeFacts<kKcclBool, Kind::kBool> {};
template <>
struct FactsOf<complex64> : TypeFacts<kKcclComplex64, Kind::kComplex> {};
template <>
struct FactsOf<complex128> : TypeFacts<kKcclComplex128, Kind::kComplex> {};

template <class T>
constexpr uint32_t kDtypeOf = FactsOf<T>::kDtype;
template <class T>
constexpr Kind kKindOf = FactsOf<T>::kKind;
template <class T>
constexpr bool kIsInteger = kKindOf<T> == Kind::kSigned || kKindOf<T> == Kind::kUnsigned;
// Tells whether T has NaN.
template <class T>
constexpr bool kHasNan = kKindOf<T> == Kind::kFloat || kKindOf<T> == Kind::kComplex;

// Element<T>: Acc, the accumulator; widen(T) -> Acc; narrow(Acc) -> T, which canonicalises NaN.
// Floats also have Bits, the unsigned type of Acc's size. Floats of 16 bits have narrow_pair(),
// which returns the bits of two elements. Neither may be NaN.
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

template <class T>
constexpr bool kNarrowsPairs = false;
template <>
inline constexpr bool kNarrowsPairs<f16> = true;
template <>
inline constexpr bool kNarrowsPairs<bf16> = true;

template <>
struct Element<f8e4m3> {
    using Acc = float;
    using Bits = uint32_t;
    KCCL_DEVICE static Acc widen(f8e4m3 value) { return float8::float_from_e4m3(value.bits); }
    KCCL_DEVICE static f8e4m3 narrow(Acc acc) {
        return {acc != acc ? uint8_t{0x7f} : float8::e4m3_from_float(acc)};
    }
};

template <>
struct Element<f8e5m2> {
    using Acc = float;
    using Bits = uint32_t;
    KCCL_DEVICE static Acc widen(f8e5m2 value) { return float8::float_from_e5m2(value.bits); }
    KCCL_DEVICE static f8e5m2 narrow(Acc acc) {
        return {acc != acc ? uint8_t{0x7e} : float8::e5m2_from_float(acc)};
    }
};

// The accumulator is unsigned, because signed overflow is undefined.
template <class T, class Unsigned>
struct IntegerElement {
    using Acc = Unsigned;
    KCCL_DEVICE static Acc widen(T value) { return static_cast<Acc>(value); }
    KCCL_DEVICE static T narrow(Acc acc) { return static_cast<T>(acc); }
};
template <>
struct Element<int8_t> : IntegerElement<int8_t, uint8_t> {};
template <>
struct Element<int16_t> : IntegerElement<int16_t, uint16_t> {};
template <>
struct Element<int32_t> : IntegerElement<int32_t, uint32_t> {};
template <>
struct Element<int64_t> : IntegerElement<int64_t, uint64_t> {};
template <>
struct Element<uint8_t> : IntegerElement<uint8_t, uint8_t> {};
template <>
struct Element<uint16_t> : IntegerElement<uint16_t, uint16_t> {};
template <>
struct Element<uint32_t> : IntegerElement<uint32_t, uint32_t> {};
template <>
struct Element<uint64_t> : IntegerElement<uint64_t, uint64_t> {};

template <>
struct Element<boolean> {
    using Acc = uint8_t;
    KCCL_DEVICE static Acc widen(boolean value) { return value.bits != 0; }
    KCCL_DEVICE static boolean narrow(Acc acc) { return {acc}; }
};

template <class Real>
struct Element<Complex<Real>> {
    using Acc = Complex<Real>;
    KCCL_DEVICE static Acc widen(Complex<Real> value) { return value; }
    KCCL_DEVICE static Complex<Real> narrow(Acc acc) {
        return {Element<Real>::narrow(acc.re), Element<Real>::narrow(acc.im)};
    }
};

}  // namespace kccl
