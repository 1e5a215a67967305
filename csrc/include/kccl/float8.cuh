// Floats of 8 bits, in software, because the hardware of some GPUs rounds values that are too large
// in another way. The code has no branches, so that a CPU's loops over elements become vector code.
//
//   e4m3   4 bits of exponent, 3 of mantissa; no infinity; the largest value is 448
//   e5m2   5 and 2; the upper half of an f16; the largest value is 57344
//
// Too large a value becomes NaN in e4m3 and infinity in e5m2, as in ml_dtypes.
#pragma once

#include "mem.cuh"

namespace kccl::float8 {

// Converts exactly. A NaN becomes a quiet NaN.
KCCL_DEVICE float float_from_e4m3(uint8_t bits) {
    const uint32_t sign = (bits & 0x80u) << 24;
    const uint32_t magnitude = bits & 0x7fu;
    const uint32_t normal = (magnitude << 20) + (120u << 23);
    const uint32_t subnormal =
        platform::bit_cast<uint32_t>(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-9f);
    const uint32_t value = magnitude == 0x7fu ? 0x7fc00000u : magnitude < 8u ? subnormal : normal;
    return platform::bit_cast<float>(value | sign);
}

KCCL_DEVICE float float_from_e5m2(uint8_t bits) {
    return mem::float_from_half(static_cast<uint16_t>(bits << 8));
}

// Rounds a float without its sign, whose bits are `magnitude`, to nearest even. Returns the bits of
// a float with MANTISSA bits of mantissa and an exponent with this BIAS. The value must not be too
// large for that type.
template <uint32_t MANTISSA, uint32_t BIAS>
KCCL_DEVICE uint32_t rounded(uint32_t magnitude) {
    constexpr uint32_t kDropped = 23 - MANTISSA;
    constexpr uint32_t kHalf = (1u << (kDropped - 1)) - 1;
    // The bits of a power of two. If it is added to the value as a float, the floating-point unit
    // rounds to multiples of the type's smallest subnormal.
    constexpr uint32_t kShift = (127u + 24u - BIAS - MANTISSA) << 23;
    const uint32_t normal =
        (magnitude + kHalf + ((magnitude >> kDropped) & 1u) - ((127u - BIAS) << 23)) >> kDropped;
    const float shifted =
        platform::bit_cast<float>(magnitude) + platform::bit_cast<float>(uint32_t{kShift});
    const uint32_t subnormal = platform::bit_cast<uint32_t>(shifted) - kShift;
    return magnitude < (128u - BIAS) << 23 ? subnormal : normal;
}

// Rounds to nearest even, as e5m2_from_float() does. `value` must not be NaN.
KCCL_DEVICE uint8_t e4m3_from_float(float value) {
    constexpr uint32_t kMost = 0x43e80000u;  // 464: it rounds to 448, a larger value to NaN
    const uint32_t bits = platform::bit_cast<uint32_t>(value);
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t number = rounded<3, 7>(magnitude) | (bits >> 24 & 0x80u);
    return static_cast<uint8_t>(magnitude > kMost ? 0x7fu : number);
}

// Rounds any value to e4m3, limited to the range from -448 to 448. NaN becomes the canonical NaN.
KCCL_DEVICE uint8_t limited_e4m3(float value) {
    const float most = value > 448.0f ? 448.0f : value;
    const float limited = most < -448.0f ? -448.0f : most;
    return value != value ? uint8_t{0x7f} : e4m3_from_float(limited);
}

// Rounds two values as limited_e4m3() does. The first one goes into the lower byte.
KCCL_DEVICE uint32_t limited_e4m3s(float first, float second) {
#if defined(KCCL_MEM_CONVERTS_E4M3)
    return mem::e4m3s_from_floats(first, second);
#else
    return limited_e4m3(first) | static_cast<uint32_t>(limited_e4m3(second)) << 8;
#endif
}

KCCL_DEVICE uint8_t e5m2_from_float(float value) {
    constexpr uint32_t kTooLarge = 0x47700000u;  // 61440: it and larger values round to infinity
    const uint32_t bits = platform::bit_cast<uint32_t>(value);
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t number = magnitude >= kTooLarge ? 0x7cu : rounded<2, 15>(magnitude);
    return static_cast<uint8_t>(number | (bits >> 24 & 0x80u));
}

}  // namespace kccl::float8
