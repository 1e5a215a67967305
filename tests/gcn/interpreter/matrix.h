// What CDNA3's matrix units make of products of 16-bit floats.
//
// AMD does not say how they add up. This follows what others have found on a MI300X, and compared
// with it bit for bit: Xie, Wang, Yang, Yang, "MMA-Sim", arXiv 2511.10909, and its repository
// microsoft/MMA-Sim. Eight products at a time are exact, cut off behind 24 binary places of the
// largest one, and added up. Their sum and the addend are rounded down, to 31 and 24 places of the
// larger one. What both give is rounded to the nearest FP32, ties to even.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

namespace gcn {

constexpr int kProductsAtOnce = 8;

// A number of 16 bits: digits * 2^(exponent - 10).
struct Factor {
    double value;
    int64_t digits;
    int exponent;
};

// The exponents of zero, and of FP16's and of BF16's smallest normal numbers.
constexpr int kZeroExponent = -126, kLeastHalf = -14, kLeastBfloat16 = -126;

inline Factor factor_of(float value, int least_exponent) {
    if (value == 0 || !std::isfinite(value)) return {value, 0, kZeroExponent};
    const int exponent = std::max(std::ilogb(value), least_exponent);
    return {value, static_cast<int64_t>(std::ldexp(value, 10 - exponent)), exponent};
}

// Toward zero, and down.
inline int64_t cut_off(int64_t digits, int places) {
    if (places > 62) return 0;
    return digits < 0 ? -(-digits >> places) : digits >> places;
}
inline int64_t rounded_down(int64_t digits, int places) { return digits >> std::min(places, 62); }

// addend + a[0] b[0] + ... + a[7] b[7].
inline float fused_sum(const Factor* a, const Factor* b, float addend) {
    double whole = addend;
    int most = std::numeric_limits<int>::min();
    bool is_above = false, is_below = false;
    for (int i = 0; i < kProductsAtOnce; ++i) {
        const double product = a[i].value * b[i].value;
        whole += product;
        is_above |= product >= 0x1p128;
        is_below |= product <= -0x1p128;
        most = std::max(most, a[i].exponent + b[i].exponent);
    }
    constexpr float kInfinity = std::numeric_limits<float>::infinity();
    if (!std::isfinite(whole)) return static_cast<float>(whole);
    if (is_above && is_below) return std::numeric_limits<float>::quiet_NaN();
    if (is_above || is_below) return is_above ? kInfinity : -kInfinity;
    int64_t sum = 0;  // of 2^(most - 24)
    for (int i = 0; i < kProductsAtOnce; ++i) {
        const int below = most - a[i].exponent - b[i].exponent;
        sum += cut_off(a[i].digits * b[i].digits * 16, below);
    }
    const int exponent = addend == 0 ? kZeroExponent : std::max(std::ilogb(addend), kZeroExponent);
    const auto digits = static_cast<int64_t>(std::ldexp(addend, 24 - exponent));
    const int larger = std::max(most, exponent);
    const int64_t total =
        rounded_down(sum * 128, larger - most) + rounded_down(digits, larger - exponent) * 128;
    return static_cast<float>(std::ldexp(static_cast<double>(total), larger - 31));
}

}  // namespace gcn
