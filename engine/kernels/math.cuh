// Functions that run-time compilers and AMD's clang have no common library for.
#pragma once

#include <kccl/kccl.cuh>

namespace kccl::decode {

// 2 to the power of an integer, which a float holds; 0 below -126. At most 127.
KCCL_DEVICE float power_of_two(float n) {
    if (n < -126.0f) return 0.0f;
    const auto bits = static_cast<uint32_t>(static_cast<int32_t>(n) + 127) << 23;
    return platform::bit_cast<float>(bits);
}

// Rounds to an integer; of at most 2^22 in size.
KCCL_DEVICE float rounded(float x) {
    constexpr float kRounder = 12582912.0f;
    return (x + kRounder) - kRounder;
}

// 2 to the power of x, within 2 units of the last place; 0 below -126. x is at most 127.
KCCL_DEVICE float exponential2(float x) {
    const float n = rounded(x < -127.0f ? -127.0f : x);
    const float r = x < -127.0f ? 0.0f : x - n;
    float sum = 1.5403530e-4f;
    sum = sum * r + 1.33335581e-3f;
    sum = sum * r + 9.61812911e-3f;
    sum = sum * r + 5.55041087e-2f;
    sum = sum * r + 2.40226507e-1f;
    sum = sum * r + 6.93147181e-1f;
    sum = sum * r + 1.0f;
    return sum * power_of_two(n);
}

constexpr float kLog2E = 1.44269504088896341f;

KCCL_DEVICE float exponential(float x) { return exponential2((x < 87.0f ? x : 87.0f) * kLog2E); }

KCCL_DEVICE float silu(float x) { return x / (1.0f + exponential(-x)); }

}  // namespace kccl::decode
