// What ranks_as_threads.cpp compares with: inputs whose results are exact in every element type,
// and those results, computed in integers.
#pragma once

#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "csrc/host/host.h"

constexpr uint64_t kItemBytes[kKcclNumDtypes] = {4, 8, 2, 2, 4, 8, 1, 2, 1,
                                                 2, 4, 8, 1, 1, 1, 8, 16};

__attribute__((format(printf, 2, 3))) inline void check(bool is_right, const char* format, ...) {
    if (is_right) return;
    va_list arguments;
    va_start(arguments, format);
    std::vfprintf(stderr, format, arguments);
    va_end(arguments);
    std::fputc('\n', stderr);
    // Not exit(): the other threads still run, and static destructors would race with them.
    std::_Exit(1);
}

namespace oracle {

inline bool is_integer(int dtype) { return dtype >= kKcclInt32 && dtype <= kKcclInt16; }

// A hash of three small numbers (splitmix64's finaliser).
inline uint64_t mix(uint64_t a, uint64_t b, uint64_t c) {
    uint64_t x = a * 0x9E3779B97F4A7C15u + b * 0xBF58476D1CE4E5B9u + c * 0x94D049BB133111EBu + 1;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return x >> 32;
}

// Element i of a rank's input: small, so that results fit bfloat16; for avg a multiple of every
// number of ranks up to 4.
inline int input(int op, uint64_t seed, int rank, uint64_t i, int world_size) {
    const int number = static_cast<int>(mix(seed, static_cast<uint64_t>(rank), i) % 9) - 4;
    if (op == kKcclProd) return number < 0 ? -2 : 1;
    check(world_size <= 4, "%d ranks: an average is exact for at most 4", world_size);
    return op == kKcclAvg ? number * 12 : number;
}

// The reduction of element i of `num_terms` ranks, from `first` on.
inline int reduced(int op, uint64_t seed, uint64_t i, int world_size, int first, int num_terms) {
    int result = input(op, seed, first, i, world_size);
    for (int rank = first + 1; rank < first + num_terms; ++rank) {
        const int next = input(op, seed, rank, i, world_size);
        if (op == kKcclProd) {
            result *= next;
        } else if (op == kKcclMin) {
            result = next < result ? next : result;
        } else if (op == kKcclMax) {
            result = next > result ? next : result;
        } else {
            result += next;
        }
    }
    return op == kKcclAvg ? result / num_terms : result;
}

// Writes a small integer as an element of a float or a signed integer.
inline void encode(uint8_t* to, int dtype, int value) {
    const float as_float = static_cast<float>(value);
    const double as_double = value;
    const int64_t as_int64 = value;
    uint32_t bits;
    std::memcpy(&bits, &as_float, 4);
    // Small integers are normal numbers in float16 and lose no bits in either 16-bit type.
    const uint32_t rebiased = value == 0 ? 0 : ((bits & 0x7fffffffu) >> 13) - ((127u - 15u) << 10);
    const uint16_t as_float16 = static_cast<uint16_t>((bits >> 16 & 0x8000u) | rebiased);
    const uint16_t as_bfloat16 = static_cast<uint16_t>(bits >> 16);
    switch (dtype) {
        case kKcclFloat32: std::memcpy(to, &as_float, 4); return;
        case kKcclFloat64: std::memcpy(to, &as_double, 8); return;
        case kKcclFloat16: std::memcpy(to, &as_float16, 2); return;
        case kKcclBfloat16: std::memcpy(to, &as_bfloat16, 2); return;
        default: std::memcpy(to, &as_int64, kItemBytes[dtype]); return;
    }
}

}  // namespace oracle
