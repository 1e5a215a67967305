// Functions of math.cuh by correctly rounded operations. They give the same bits on AMD's GPUs and
// in the simulator, so each can be tested against the other.
#pragma once

namespace kccl::decode {

KCCL_DECODE float reciprocal(float x) { return 1.0f / x; }

KCCL_DECODE float reciprocal_root(float x) { return 1.0f / platform::square_root(x); }

KCCL_DECODE float rounded_product(float a, float b) { return a * b; }

KCCL_DECODE float times_plus(float a, float b, float c) { return a * b + c; }

KCCL_DECODE float exponential2(float x) {
    const float n = rounded(x < -127.0f ? -127.0f : x);
    const float r = x < -127.0f ? 0.0f : x - n;
    // The coefficients are fitted for r within 1/2, where the relative error is at most 3e-9.
    // Taylor's coefficients would give 1.6e-7 at the ends.
    float sum = 1.5326463e-4f;
    sum = sum * r + 1.3390806e-3f;
    sum = sum * r + 9.618506e-3f;
    sum = sum * r + 5.55036e-2f;
    sum = sum * r + 2.4022648e-1f;
    sum = sum * r + 6.931472e-1f;
    sum = sum * r + 1.0f;
    return sum * power_of_two(n);
}

KCCL_DECODE uint32_t most_of_warp(uint32_t word) {
    const uint32_t thread = platform::thread_in_block() % platform::kWarpSize;
    for (uint32_t step = 1; step < platform::kWarpSize; step *= 2) {
        const uint32_t other = platform::shuffle_word(word, thread ^ step);
        if (other > word) word = other;
    }
    return word;
}

KCCL_DECODE uint32_t num_bits(uint64_t word) {
    return static_cast<uint32_t>(__builtin_popcountll(word));
}

}  // namespace kccl::decode
