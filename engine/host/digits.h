// Turns vectors into fixed-point numbers, by which integer weights are multiplied.
//
// A vector is cut into groups of 32 values. A value becomes x = n * scale. n is an integer of 24
// bits, and scale is a power of two, the same for the group. So the value is rounded to a multiple
// of 2^-22 times the largest power of two that is not above the group's largest number (of 2^-21
// times it if that number is just below the next power). n is cut into three signed digits of 8
// bits: n = (digit[2] * 256 + digit[1]) * 256 + digit[0]. Sums of products of digits with weights
// of 8 bits are exact, so they have the same bits in any order.
#pragma once

#include <stdint.h>
#include <string.h>

#include <algorithm>

namespace kccl::engine {

constexpr uint32_t kDigitGroup = 32;

struct alignas(16) DigitGroup {
    // The digits, as Integers::place() of the instruction set lays them out (integers.h).
    uint8_t digits[4 * kDigitGroup];
    // Each sum of products of weights and digits begins with this number, for each half of the
    // group and each digit's place. Formats store a weight of 0 as an integer kZero, so a sum of
    // products is too large by kZero times the sum of the digits. start is minus that. Where
    // weights have one scale for 32 columns, start[0] is for the whole group.
    int32_t start[2][3];
    float scale;  // NaN if a number is NaN or infinite
    float sum;    // of all 32 rounded values
};

namespace {

inline float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof(value));
    return value;
}

// An integer n of a group plus this has three bytes. Each of them is the digit plus 128.
constexpr int32_t kDigitBias = 0x808080;

// Makes the group *to from the 32 values x. zero: the integer that the weights' format stores for a
// weight of 0. scales: how many scales weights have for 32 columns, 1 or 2.
template <class Integers>
inline void make_digits(const float* x, int32_t zero, uint32_t scales, DigitGroup* to) {
    uint32_t bits[kDigitGroup];
    memcpy(bits, x, sizeof(bits));
    uint32_t most = 0;
    for (const uint32_t each : bits) most = std::max(most, each & 0x7fffffff);
    if (most >= 0x7f800000) {
        *to = {};
        to->scale = to->sum = __builtin_nanf("");
        return;
    }
    // The group's largest number is below 2^(exponent - 126), so that its integer is below 2^23. A
    // number just below that power takes the next exponent, because its integer would not fit into
    // three digits. The lower bound of 30 keeps `factor` and `scale` within FP32.
    const uint32_t exponent = std::max((most + 0x10200) >> 23, 30u);
    const float factor = float_of((276 - exponent) << 23);
    int32_t biased[kDigitGroup];
    for (uint32_t i = 0; i < kDigitGroup; ++i) {
        // Adding 2^23 rounds the number to an integer, which is then in the lower bits of the FP32
        // word.
        const float rounded = float_of(bits[i] & 0x7fffffff) * factor + 8388608.0f;
        uint32_t magnitude;
        memcpy(&magnitude, &rounded, sizeof(magnitude));
        const auto negative = -static_cast<int32_t>(bits[i] >> 31);
        const auto number = static_cast<int32_t>(magnitude & 0x7fffff);
        biased[i] = ((number ^ negative) - negative) + kDigitBias;
    }
    Integers::place(biased, to->digits);
    constexpr int32_t kHalf = kDigitGroup / 2;
    int32_t total = 0, sums[2][3];
    for (int half = 0; half < 2; ++half) {
        // `outer` has two sums in one word: that of the first bytes in its lower half, that of the
        // third bytes in its upper half.
        int32_t outer = 0, middle = 0;
        for (int i = 0; i < kHalf; ++i) {
            const int32_t each = biased[half * kHalf + i];
            outer += each & 0xff00ff;
            middle += each >> 8 & 255;
        }
        const int32_t bytes[] = {outer & 0xffff, middle, outer >> 16};
        total += (bytes[2] * 256 + bytes[1]) * 256 + bytes[0] - kHalf * kDigitBias;
        for (int k = 0; k < 3; ++k) sums[half][k] = bytes[k] - 128 * kHalf;
    }
    for (int k = 0; k < 3; ++k) {
        to->start[0][k] = -zero * (sums[0][k] + (scales == 1 ? sums[1][k] : 0));
        to->start[1][k] = -zero * sums[1][k];
    }
    to->scale = float_of((exponent - 22) << 23);
    to->sum = static_cast<float>(total) * to->scale;
}

}  // namespace
}  // namespace kccl::engine
