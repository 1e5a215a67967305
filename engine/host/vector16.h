// Defines vectors of 16 floats, in as many registers as the instruction set needs. The compiler's
// own vector type of 64 bytes would go through memory if registers are shorter.
#pragma once

#include <stdint.h>

#include "products.h"

namespace kccl::engine {
namespace {

#if defined(__AVX512F__)
constexpr int kPerRegister = 16;
#elif defined(__AVX2__)
constexpr int kPerRegister = 8;
#else
constexpr int kPerRegister = 4;
#endif

typedef float FloatRegister __attribute__((vector_size(kPerRegister * 4)));
typedef int32_t IntRegister __attribute__((vector_size(kPerRegister * 4)));
typedef uint16_t ShortRegister __attribute__((vector_size(kPerRegister * 2)));

// A vector of N elements: two halves, which are made of halves again, down to registers. An array
// of registers would go through memory, too.
template <class Register, int N>
struct Wide {
    Wide<Register, N / 2> low, high;
};
template <class Register>
struct Wide<Register, kPerRegister> {
    Register value;
};

using Floats16 = Wide<FloatRegister, 16>;
using Ints16 = Wide<IntRegister, 16>;

// Applies f to corresponding registers of one or more vectors, and returns the vector of its
// results.
template <class To, int N, class F, class... From>
inline Wide<To, N> each(F f, const Wide<From, N>&... from) {
    if constexpr (N == kPerRegister) {
        return {f(from.value...)};
    } else {
        return {each<To, N / 2>(f, from.low...), each<To, N / 2>(f, from.high...)};
    }
}

template <class Register, int N, class Value>
inline Wide<Register, N> filled(Value value) {
    if constexpr (N == kPerRegister) {
        // Subtracting a register of zeros fills a register with the value. The subtraction is
        // optimised away, because it changes no number. Adding zero would change -0.
        return {value - Register{}};
    } else {
        return {filled<Register, N / 2>(value), filled<Register, N / 2>(value)};
    }
}

inline Floats16 all(float value) { return filled<FloatRegister, 16>(value); }
inline Ints16 all(int32_t value) { return filled<IntRegister, 16>(value); }

template <class Register, int N, class Value>
inline Wide<Register, N> loaded(const Value* from) {
    Wide<Register, N> to;
    if constexpr (N == kPerRegister) {
        __builtin_memcpy(&to.value, from, sizeof(to.value));
    } else {
        to.low = loaded<Register, N / 2>(from);
        to.high = loaded<Register, N / 2>(from + N / 2);
    }
    return to;
}

inline Floats16 load(const float* from) { return loaded<FloatRegister, 16>(from); }
inline Ints16 load(const int32_t* from) { return loaded<IntRegister, 16>(from); }

// Loads N numbers of BF16 and converts them to FP32.
template <int N>
inline Wide<FloatRegister, N> widened(const uint16_t* from) {
    if constexpr (N == kPerRegister) {
        ShortRegister bits;
        __builtin_memcpy(&bits, from, sizeof(bits));
        return {(FloatRegister)(__builtin_convertvector(bits, IntRegister) << 16)};
    } else {
        return {widened<N / 2>(from), widened<N / 2>(from + N / 2)};
    }
}
inline Floats16 load(const uint16_t* from) { return widened<16>(from); }

template <class Value, class Register, int N>
inline void store(Value* to, const Wide<Register, N>& value) {
    if constexpr (N == kPerRegister) {
        __builtin_memcpy(to, &value.value, sizeof(value.value));
    } else {
        store(to, value.low);
        store(to + N / 2, value.high);
    }
}

#define KCCL_ENGINE_OPERATOR(Register, op)                                          \
    inline Wide<Register, 16> operator op(const Wide<Register, 16>& a,              \
                                          const Wide<Register, 16>& b) {            \
        return each<Register>([](Register x, Register y) { return x op y; }, a, b); \
    }
KCCL_ENGINE_OPERATOR(FloatRegister, +)
KCCL_ENGINE_OPERATOR(FloatRegister, -)
KCCL_ENGINE_OPERATOR(FloatRegister, *)
KCCL_ENGINE_OPERATOR(FloatRegister, /)
KCCL_ENGINE_OPERATOR(IntRegister, +)
KCCL_ENGINE_OPERATOR(IntRegister, -)
KCCL_ENGINE_OPERATOR(IntRegister, &)
KCCL_ENGINE_OPERATOR(IntRegister, ^)
#undef KCCL_ENGINE_OPERATOR

// The comparisons return -1 in each element for which they are true, else 0.
template <class Register>
inline Ints16 is_less(const Wide<Register, 16>& a, const Wide<Register, 16>& b) {
    return each<IntRegister>([](Register x, Register y) { return x < y; }, a, b);
}
inline Ints16 is_equal(const Floats16& a, const Floats16& b) {
    return each<IntRegister>([](FloatRegister x, FloatRegister y) { return x == y; }, a, b);
}
inline Floats16 select(const Ints16& is_first, const Floats16& a, const Floats16& b) {
    return each<FloatRegister>(
        [](IntRegister first, FloatRegister x, FloatRegister y) { return first != 0 ? x : y; },
        is_first, a, b);
}
inline Floats16 larger(const Floats16& a, const Floats16& b) { return select(is_less(b, a), a, b); }
inline Floats16 smaller(const Floats16& a, const Floats16& b) {
    return select(is_less(a, b), a, b);
}
inline Ints16 to_ints(const Floats16& a) {
    return each<IntRegister>(
        [](FloatRegister x) { return __builtin_convertvector(x, IntRegister); }, a);
}
// Returns 2^n, for n from -126 to 127.
inline Floats16 power_of_two(const Ints16& n) {
    return each<FloatRegister>([](IntRegister x) { return (FloatRegister)((x + 127) << 23); }, n);
}
inline Ints16 half_of(const Ints16& n) {
    return each<IntRegister>([](IntRegister x) { return x >> 1; }, n);
}

// Loads the last, incomplete vector of an array, n elements, and fills it up with zeros.
template <class Element>
inline Floats16 load_part(const Element* from, uint32_t n) {
    Element all_of[16] = {};
    __builtin_memcpy(all_of, from, n * sizeof(Element));
    return load(all_of);
}

inline void store_part(float* to, const Floats16& value, uint32_t n) {
    float all_of[16];
    store(all_of, value);
    __builtin_memcpy(to, all_of, n * sizeof(float));
}

// Calls f(first element, number of elements) for each vector of an array of n elements. All vectors
// have 16, but the last may have fewer.
template <class F>
inline void each_vector(uint32_t n, F f) {
    uint32_t i = 0;
    for (; i + 16 <= n; i += 16) f(i, 16u);
    if (i < n) f(i, n - i);
}

template <class Element>
inline Floats16 load_some(const Element* from, uint32_t n) {
    return n == 16 ? load(from) : load_part(from, n);
}

inline void store_some(float* to, const Floats16& value, uint32_t n) {
    n == 16 ? store(to, value) : store_part(to, value, n);
}

// Returns the sum of all elements. The order is fixed: halves are added until one element is left.
inline float sum_of(const Floats16& v) {
    float a[16];
    store(a, v);
    for (int half = 8; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) a[i] += a[i + half];
    }
    return a[0];
}

inline float largest_of(const Floats16& v) {
    float a[16];
    store(a, v);
    for (int half = 8; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) a[i] = a[i + half] > a[i] ? a[i + half] : a[i];
    }
    return a[0];
}

// Returns exp(x) to within 2 units in the last place, by Cephes' polynomial. It is 0 below -87.3,
// infinity above 88.7, and NaN for NaN. IS_NEGATIVE: no element is above 0. This saves a quarter of
// the work, and the bits are the same.
template <bool IS_NEGATIVE = false>
inline Floats16 exp_of(const Floats16& x) {
    const Floats16 low = all(-87.3f), high = all(88.7f);
    const Floats16 bounded = larger(IS_NEGATIVE ? x : smaller(x, high), low);
    // Adding 1.5 * 2^23 rounds to an integer; subtracting it again leaves that integer.
    const Floats16 rounds = all(12582912.0f);
    const Floats16 n = (bounded * all(1.44269504f) + rounds) - rounds;
    const Floats16 r = (bounded - n * all(0.693359375f)) + n * all(2.12194440e-4f);
    Floats16 p = all(1.9875691500e-4f);
    p = p * r + all(1.3981999507e-3f);
    p = p * r + all(8.3334519073e-3f);
    p = p * r + all(4.1665795894e-2f);
    p = p * r + all(1.6666665459e-1f);
    p = p * r + all(5.0000001201e-1f);
    p = p * r * r + r + all(1.0f);
    const Ints16 exponent = to_ints(n);
    Floats16 value;
    if constexpr (IS_NEGATIVE) {
        value = p * power_of_two(exponent);
    } else {
        // The result is multiplied by 2^exponent in two steps, because 2^128 is no FP32 number.
        const Ints16 half = half_of(exponent);
        value = p * power_of_two(half) * power_of_two(exponent - half);
        value = select(is_less(high, x), all(__builtin_inff()), value);
    }
    const Floats16 of_numbers = select(is_less(x, low), all(0.0f), value);
    // The bounds have turned a NaN into a number, so the result is x itself where x is NaN.
    return select(is_equal(x, x), of_numbers, x);
}

}  // namespace
}  // namespace kccl::engine
