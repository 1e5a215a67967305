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

// Merges the second half of N parts into the first, and so on. N is a power of two. So parts whose
// numbers are equal modulo a power of two come together first.
template <uint32_t N>
KCCL_DEVICE Part merge_all(Part* parts) {
    if constexpr (N == 1) {
        return parts[0];
    } else {
        KCCL_UNROLL
        for (uint32_t i = 0; i < N / 2; ++i) parts[i] = merge(parts[i], parts[i + N / 2]);
        return merge_all<N / 2>(parts);
    }
}

// Likewise the parts of N neighbouring threads, of which all get the result. Called by all threads
// of the warp; thread: this one's number in it.
template <uint32_t N>
KCCL_DEVICE Part merge_shared(Part part, uint32_t thread) {
    static_assert(N <= platform::kWarpSize, "threads of one warp");
    KCCL_UNROLL
    for (uint32_t step = N / 2; step > 0; step /= 2) {
        const Part other = platform::shuffle(part, thread ^ step);
        part = (thread & step) == 0 ? merge(part, other) : merge(other, part);
    }
    return part;
}

// What attention gives for four elements, once all positions are in the part. Its lowest bits are
// cleared as the board clears them, so that bits are the same whether it goes over the board.
KCCL_DEVICE Quad attended_by(const Part& part) {
    const float inverse = reciprocal(part.weight);
    Quad quad;
    KCCL_UNROLL
    for (int i = 0; i < 4; ++i) quad.value[i] = untagged(part.sum.value[i] * inverse);
    return quad;
}

}  // namespace kccl::decode
