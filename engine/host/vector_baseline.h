// Vectors of 16 rows on any CPU. The compiler makes of them what it has.
#pragma once

#include <stdint.h>

namespace kccl::engine {
namespace {

struct Vector {
    struct Floats {
        float row[16];
    };
    static constexpr int kWidth = 16;
    static constexpr int kTile = 2;
    static constexpr int kTileColumns = 2;

    static Floats zero() { return {}; }
    static void load(const uint16_t* pair, Floats* even, Floats* odd) {
        for (int i = 0; i < kWidth; ++i) {
            uint32_t both;
            __builtin_memcpy(&both, pair + 2 * i, sizeof(both));
            const uint32_t low = both << 16, high = both & 0xffff0000;
            __builtin_memcpy(&even->row[i], &low, sizeof(low));
            __builtin_memcpy(&odd->row[i], &high, sizeof(high));
        }
    }
    static Floats fma(Floats weights, float x, Floats sum) {
        for (int i = 0; i < kWidth; ++i) {
            sum.row[i] = __builtin_fmaf(weights.row[i], x, sum.row[i]);
        }
        return sum;
    }
    static Floats add(Floats a, Floats b) {
        for (int i = 0; i < kWidth; ++i) a.row[i] += b.row[i];
        return a;
    }
    static void store(float* to, Floats value) { __builtin_memcpy(to, &value, sizeof(value)); }
};

}  // namespace
}  // namespace kccl::engine
