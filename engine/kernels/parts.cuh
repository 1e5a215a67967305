// Attention over a part of the positions, and how two such parts become one. Scores count in powers
// of two, and a part's maximum is an integer, so that scaling a part is exact. The sums lose their
// lowest bit at each step, as on the board. So it does not matter which block merges.
#pragma once

#include "board.cuh"
#include "math.cuh"

namespace kccl::decode {

// The maximum of a part without positions; its weight is 0.
constexpr float kNoPositions = -1048576.0f;

struct Part {
    Quad sum;       // of four elements of the values, each times 2^(score - maximum)
    float maximum;  // of the scores, rounded
    float weight;   // sum of 2^(score - maximum)
};

KCCL_DEVICE Part merge(const Part& a, const Part& b) {
    Part both;
    both.maximum = a.maximum < b.maximum ? b.maximum : a.maximum;
    const float scale_a = power_of_two(a.maximum - both.maximum);
    const float scale_b = power_of_two(b.maximum - both.maximum);
    both.weight = untagged(a.weight * scale_a + b.weight * scale_b);
    KCCL_UNROLL
    for (int i = 0; i < 4; ++i) {
        both.sum.value[i] = untagged(a.sum.value[i] * scale_a + b.sum.value[i] * scale_b);
    }
    return both;
}

// Merges neighbours, then the pairs, and so on. N is a power of two.
template <uint32_t N>
KCCL_DEVICE Part merge_all(Part (&parts)[N]) {
    KCCL_UNROLL
    for (uint32_t step = 1; step < N; step *= 2) {
        KCCL_UNROLL
        for (uint32_t i = 0; i + step < N; i += 2 * step)
            parts[i] = merge(parts[i], parts[i + step]);
    }
    return parts[0];
}

}  // namespace kccl::decode
