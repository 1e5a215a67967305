// Chooses experts by their logits.
#pragma once

#include "expert_choice.cuh"
#include "math.cuh"

namespace kccl::decode {

// An expert's logit. Of two experts the one with the larger logit comes first; of equal logits, the
// one of the expert with the lower number. A logit that is NaN comes last.
struct RoutedExpert {
    float logit;
    uint32_t expert;

    KCCL_DECODE bool comes_before(const RoutedExpert& other) const {
        return logit > other.logit || (logit == other.logit && expert < other.expert);
    }
};

// Returns the first of the experts that the threads of a warp have. All threads get it.
KCCL_DECODE RoutedExpert first_of_warp(RoutedExpert mine) {
    KCCL_UNROLL
    for (uint32_t step = platform::kWarpSize / 2; step > 0; step /= 2) {
        const uint32_t source = warp().index() ^ step;
        const uint32_t logit =
            platform::shuffle_word(platform::bit_cast<uint32_t>(mine.logit), source);
        const RoutedExpert other = {platform::bit_cast<float>(logit),
                                    platform::shuffle_word(mine.expert, source)};
        if (other.comes_before(mine)) mine = other;
    }
    return mine;
}

// Chooses the experts with the largest logits, and writes the choice to *choice. float4 k of this
// thread has the logits of experts 4 * (thread + k * warp size) and the three behind it. Called by
// all threads of a warp.
template <class S, uint32_t N>
KCCL_DECODE void choose_experts(const Float4 (&float4s)[N], ExpertChoice<S>* choice) {
    static_assert(S::kPlaces <= platform::kWarpSize, "a thread for each chosen expert");
    static_assert(4 * N <= 32, "a bit for each logit of a thread");
    // Minus infinity, and NaN.
    const float kLast = platform::bit_cast<float>(0xff800000u);
    const float kNan = platform::bit_cast<float>(0x7fc00000u);
    const uint32_t thread = warp().index();
    float logits[4 * N];
    bool has_nan = false;
    KCCL_UNROLL
    for (uint32_t i = 0; i < 4 * N; ++i) {
        logits[i] = float4s[i / 4].value[i % 4];
        has_nan = has_nan || logits[i] != logits[i];
        if (logits[i] != logits[i]) logits[i] = kLast;
    }
    const auto expert_of = [&](uint32_t i) {
        return (thread + i / 4 * platform::kWarpSize) * 4 + i % 4;
    };
    uint32_t is_chosen = 0;  // bit i: logits[i] is chosen
    RoutedExpert mine = {kLast, ~0u};
    float most = 0;
#pragma unroll 1
    for (uint32_t turn = 0; turn < S::kPlaces; ++turn) {
        RoutedExpert first = {kLast, ~0u};
        KCCL_UNROLL
        for (uint32_t i = 0; i < 4 * N; ++i) {
            const RoutedExpert each = {logits[i], expert_of(i)};
            const bool is_left = each.expert < S::kExperts && (is_chosen >> i & 1u) == 0;
            if (is_left && each.comes_before(first)) first = each;
        }
        first = first_of_warp(first);
        KCCL_UNROLL
        for (uint32_t i = 0; i < 4 * N; ++i) {
            if (expert_of(i) == first.expert) is_chosen |= 1u << i;
        }
        if (turn == thread) mine = first;
        if (turn == 0) most = first.logit;
    }
    // Chosen experts have places in the order of their numbers.
    uint32_t place = 0;
    KCCL_UNROLL
    for (uint32_t each = 0; each < S::kPlaces; ++each) {
        if (platform::shuffle_word(mine.expert, each) < mine.expert) ++place;
    }
    if (thread < S::kPlaces) {
        mem::store_plain(&choice->expert[place], mine.expert);
        mem::store_plain(&choice->share[place], exponential(mine.logit - most));
    }
    warp().sync();
    float total = 0;
    if constexpr (S::kNormalisesShares) {
        KCCL_UNROLL
        for (uint32_t each = 0; each < S::kPlaces; ++each) {
            total += mem::load_plain(&choice->share[each]);
        }
    } else {
        KCCL_UNROLL
        for (uint32_t i = 0; i < 4 * N; ++i) {
            if (expert_of(i) < S::kExperts) total += exponential(logits[i] - most);
        }
        total = platform::reduce_lanes<platform::kWarpSize>(total,
                                                            [](float a, float b) { return a + b; });
    }
    // If a logit is NaN, all shares are NaN, and so the model's logits are.
    if (platform::warp_any(has_nan)) total = kNan;
    warp().sync();
    if (thread < S::kPlaces) {
        float* const share = &choice->share[place];
        mem::store_plain(share, mem::load_plain(share) * reciprocal(total));
    }
}

}  // namespace kccl::decode
