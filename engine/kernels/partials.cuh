// Merges partial results, each of which is attention over some of the positions. A score is an
// exponent of 2, and the maximum of a partial result is an integer. So scaling a partial result to
// another maximum is exact. The sums lose their lowest bit at each merge, as in the exchange
// buffer. So the bits of the result do not depend on which block merges.
#pragma once

#include "exchange_buffer.cuh"
#include "math.cuh"

namespace kccl::decode {

// The maximum of a partial result without positions; its weight is 0.
constexpr float kNoPositions = -1048576.0f;

struct Partial {
    Float4 sum;     // of the values, each times 2^(score - maximum): four elements of the head
    float maximum;  // the largest score, rounded to an integer
    float weight;   // the sum of 2^(score - maximum)
};

KCCL_DECODE Partial merge(const Partial& a, const Partial& b) {
    Partial both;
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

// Merges N partial results, where N is a power of two. Each of the second half is merged into one
// of the first half, and likewise the remaining ones, until one is left. So those whose numbers are
// equal modulo N / 2 are merged first, then modulo N / 4, and so on.
template <uint32_t N>
KCCL_DECODE Partial merge_all(Partial* partials) {
    if constexpr (N == 1) {
        return partials[0];
    } else {
        KCCL_UNROLL
        for (uint32_t i = 0; i < N / 2; ++i) partials[i] = merge(partials[i], partials[i + N / 2]);
        return merge_all<N / 2>(partials);
    }
}

// Merges the partial results of N neighbouring threads, in the order of merge_all(). All N threads
// get the result. thread: the calling thread's number in the warp. Called by all threads of the
// warp.
template <uint32_t N>
KCCL_DECODE Partial merge_shared(Partial partial, uint32_t thread) {
    static_assert(N <= platform::kWarpSize, "threads of one warp");
    KCCL_UNROLL
    for (uint32_t step = N / 2; step > 0; step /= 2) {
        const Partial other = platform::shuffle(partial, thread ^ step);
        partial = (thread & step) == 0 ? merge(partial, other) : merge(other, partial);
    }
    return partial;
}

// Returns the attention sink of a query head of the lane group, or 0 if the model has none. Called
// before a wait, which then hides the load.
template <class S>
KCCL_DECODE float sink_of(const Task& task, uint32_t layer, uint32_t lane, uint32_t head) {
    if constexpr (!S::kHasSinks) return 0;
    const auto* const sinks = reinterpret_cast<const float*>(task.sinks);
    return mem::load_plain(sinks + (layer * S::kLanesHere + lane) * S::kHeads + head);
}

// Adds an attention sink to the partial result over all positions: one more score, without a value.
template <class S>
KCCL_DECODE Partial with_sink(const Partial& partial, float sink) {
    if constexpr (!S::kHasSinks) return partial;
    const float score = sink * kLog2E, maximum = rounded(score);
    return merge(partial, {{}, maximum, exponential2(score - maximum)});
}

// Returns the result of attention for four elements, from the partial result over all positions.
// Clears the lowest bits as the exchange buffer does, so that the bits are the same whether or not
// the result goes through the buffer.
KCCL_DECODE Float4 attended_by(const Partial& partial) {
    const float inverse = reciprocal(partial.weight);
    Float4 four;
    KCCL_UNROLL
    for (int i = 0; i < 4; ++i) four.value[i] = untagged(partial.sum.value[i] * inverse);
    return four;
}

}  // namespace kccl::decode
