// Functions for which run-time compilers and AMD's clang have no common library.
#pragma once

#include "device.cuh"

namespace kccl::decode {

// Tells whether x is neither an infinity nor NaN, by the bits. The test x - x == 0 would be wrong:
// where x is a product, compilers may round product and difference once (a fused operation), which
// leaves the product's rounding error.
KCCL_DECODE bool is_finite(float x) {
    constexpr uint32_t kExponent = 0x7f800000u;
    return (platform::bit_cast<uint32_t>(x) & kExponent) != kExponent;
}

// Returns 2 to the power of an integer that a float holds, at most 127. Returns 0 for NaN and below
// -126.
KCCL_DECODE float power_of_two(float n) {
    if (!(n >= -126.0f)) return 0.0f;
    const auto bits = static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23;
    return platform::bit_cast<float>(bits);
}

// Rounds to an integer; x is at most 2^22 in size.
KCCL_DECODE float rounded(float x) {
    constexpr float kRounder = 12582912.0f;
    return (x + kRounder) - kRounder;
}

}  // namespace kccl::decode

// reciprocal(x)          1 / x
// reciprocal_root(x)     1 / the square root of x, which is positive
// exponential2(x)        2 to the power of x, which is at most 127
// rounded_product(a, b)  a * b, rounded before something is added to it. A compiler that rounds
//                        both at once may do so in one kernel and not in another
// times_plus(a, b, c)    a * b + c, rounded once on NVIDIA's GPUs and twice elsewhere, the same in
//                        all kernels
// most_of_warp(word)     the largest of the words that the threads of a warp pass. Called by all of
//                        them
// num_bits(word)         how many bits of 64 are set
//
// Each of the first three is within 2 units of the last place, if neither x nor the result is
// subnormal: targets may take a subnormal number for 0. NaN gives NaN.
#if defined(KCCL_TARGET_CUDA)
#include "targets/math_cuda.cuh"
#else
#include "targets/math_exact.cuh"
#endif

namespace kccl::decode {

constexpr float kLog2E = 1.44269504088896341f;

// 1 / (1 + the result) is never subnormal, as silu needs.
KCCL_DECODE float exponential(float x) { return exponential2((x < 87.0f ? x : 87.0f) * kLog2E); }

// ---- double -------------------------------------------------------------------------------------

// Returns e to the power of x, within 2 units of the last place; 0 below -708. x is at most 708.
KCCL_DECODE double exponential(double x) {
    constexpr double kLog2E = 1.4426950408889634, kRounder = 6755399441055744.0;  // 1.5 * 2^52
    // The high part has 33 bits, so its product with n is exact.
    constexpr double kLn2High = 0.6931471803691238, kLn2Low = 1.9082149292705877e-10;
    if (x < -708.0) return 0.0;
    const double n = (x * kLog2E + kRounder) - kRounder;
    const double r = x - n * kLn2High - n * kLn2Low;
    // r^i / i!, of at most 0.35.
    constexpr double kTerms[] = {1.0 / 6227020800.0,
                                 1.0 / 479001600.0,
                                 1.0 / 39916800.0,
                                 1.0 / 3628800.0,
                                 1.0 / 362880.0,
                                 1.0 / 40320.0,
                                 1.0 / 5040.0,
                                 1.0 / 720.0,
                                 1.0 / 120.0,
                                 1.0 / 24.0,
                                 1.0 / 6.0,
                                 0.5,
                                 1.0,
                                 1.0};
    double sum = 0;
    KCCL_UNROLL
    for (const double term : kTerms) sum = sum * r + term;
    const auto bits = static_cast<uint64_t>(static_cast<int64_t>(n) + 1023) << 52;
    return sum * platform::bit_cast<double>(bits);
}

// Returns the natural logarithm, within 3 units of the last place. x is positive and not subnormal.
KCCL_DECODE double logarithm(double x) {
    constexpr double kLn2 = 0.6931471805599453, kRoot2 = 1.4142135623730951;
    constexpr uint64_t kMantissa = (uint64_t{1} << 52) - 1, kOne = uint64_t{1023} << 52;
    const auto bits = platform::bit_cast<uint64_t>(x);
    // x is 2^n * m, and m lies between the roots of 1/2 and of 2.
    int32_t n = static_cast<int32_t>(bits >> 52) - 1023;
    double m = platform::bit_cast<double>((bits & kMantissa) | kOne);
    if (m > kRoot2) {
        m *= 0.5;
        ++n;
    }
    // log(m) = 2 * artanh(s) = 2 * (s + s^3 / 3 + s^5 / 5 + ...), and s is at most 0.172.
    const double s = (m - 1.0) / (m + 1.0), square = s * s;
    constexpr double kTerms[] = {1.0 / 21.0, 1.0 / 19.0, 1.0 / 17.0, 1.0 / 15.0, 1.0 / 13.0,
                                 1.0 / 11.0, 1.0 / 9.0,  1.0 / 7.0,  1.0 / 5.0,  1.0 / 3.0};
    double sum = 0;
    KCCL_UNROLL
    for (const double term : kTerms) sum = sum * square + term;
    return n * kLn2 + (2.0 * s + 2.0 * s * square * sum);
}

KCCL_DECODE float silu(float x) { return x * reciprocal(1.0f + exponential(-x)); }

}  // namespace kccl::decode
