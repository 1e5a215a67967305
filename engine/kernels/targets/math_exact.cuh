// Functions of math.cuh by operations that are rounded right: the same bits on AMD's GPUs and in
// the simulator, which test each other.
#pragma once

namespace kccl::decode {

KCCL_DEVICE float reciprocal(float x) { return 1.0f / x; }

KCCL_DEVICE float reciprocal_root(float x) { return 1.0f / platform::square_root(x); }

KCCL_DEVICE float exponential2(float x) {
    const float n = rounded(x < -127.0f ? -127.0f : x);
    const float r = x < -127.0f ? 0.0f : x - n;
    float sum = 1.5353362e-4f;
    sum = sum * r + 1.33988744e-3f;
    sum = sum * r + 9.61843736e-3f;
    sum = sum * r + 5.55033247e-2f;
    sum = sum * r + 2.40226479e-1f;
    sum = sum * r + 6.93147203e-1f;
    sum = sum * r + 1.0f;
    return sum * power_of_two(n);
}

}  // namespace kccl::decode
