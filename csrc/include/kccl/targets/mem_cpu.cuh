// The common part of the two CPU targets, host and sim.
#pragma once

namespace kccl::mem {

KCCL_DEVICE void prefetch(const void*) {}

KCCL_DEVICE uint32_t forget(uint32_t value) { return value; }
KCCL_DEVICE uint32_t forget_uniform(uint32_t value) { return value; }
KCCL_DEVICE uint32_t forget_index(uint32_t value) { return value; }

template <class T>
KCCL_DEVICE T keep(T value) {
    return value;
}

// Returns a * b, rounded by itself: never fused with a sum. gcc is told so by -ffp-contract=off,
// but its vector code for complex numbers needs __builtin_assoc_barrier() too.
template <class T>
KCCL_DEVICE T product(T a, T b) {
#if defined(__clang__)
#pragma clang fp contract(off)
    return a * b;
#elif __has_builtin(__builtin_assoc_barrier)
    return __builtin_assoc_barrier(a * b);
#else
    return a * b;
#endif
}

// Converts by integers and without branches, so that loops over elements become vector code.
KCCL_DEVICE float float_from_half(uint16_t bits) {
    const uint32_t sign = (bits & 0x8000u) << 16;
    const uint32_t magnitude = bits & 0x7fffu;
    const uint32_t normal = (magnitude << 13) + (112u << 23);
    const uint32_t special = (magnitude << 13) | 0x7f800000u;
    const uint32_t subnormal = platform::bit_cast<uint32_t>(
        static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
    const uint32_t value = magnitude >= 0x7c00u ? special : magnitude < 0x400u ? subnormal : normal;
    return platform::bit_cast<float>(value | sign);
}

// Rounds to nearest even; `value` is not NaN.
KCCL_DEVICE uint16_t half_from_float(float value) {
    const uint32_t bits = platform::bit_cast<uint32_t>(value);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
    // Adding one half makes the floating-point unit round to multiples of 2^-24, half's least step.
    const uint32_t subnormal =
        platform::bit_cast<uint32_t>(platform::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
    const uint32_t half = magnitude >= 0x477ff000u  ? 0x7c00u
                          : magnitude < 0x38800000u ? subnormal
                                                    : normal;
    return static_cast<uint16_t>(half | sign);
}

// Rounds to nearest even by adding just under half of the dropped part's unit; `value` is not NaN.
KCCL_DEVICE uint16_t bfloat16_from_float(float value) {
    const uint32_t bits = platform::bit_cast<uint32_t>(value);
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Converts two numbers at a time, the first one into the lower half. The result for NaN is
// undefined.
KCCL_DEVICE uint32_t halves_from_floats(float first, float second) {
    return half_from_float(first) | static_cast<uint32_t>(half_from_float(second)) << 16;
}

KCCL_DEVICE uint32_t bfloat16s_from_floats(float first, float second) {
    return bfloat16_from_float(first) | static_cast<uint32_t>(bfloat16_from_float(second)) << 16;
}

}  // namespace kccl::mem
