// Chooses experts by their logits.
#pragma once

#include "expert_choice.cuh"
#include "math.cuh"

namespace kccl::decode {

// Returns a logit's order: a word that is the larger, the larger the logit is, and never 0. The
// logit is not NaN.
KCCL_DECODE uint32_t order_of(float logit) {
    const auto bits = platform::bit_cast<uint32_t>(logit + 0.0f);  // -0 becomes 0
    return (bits >> 31) != 0 ? ~bits : bits | 0x80000000u;
}
// Returns the logit of this order.
KCCL_DECODE float logit_of(uint32_t order) {
    return platform::bit_cast<float>((order >> 31) != 0 ? order & 0x7fffffffu : ~order);
}

// Chooses the experts with the largest logits, and writes the choice to *choice. Of equal logits,
// that of the expert with the lower number comes first. NaN counts as minus infinity. float4 k of
// this thread has the logits of experts 4 * (thread + k * warp size) and the three behind it.
// Called by all threads of a warp.
template <class S, uint32_t N>
KCCL_DECODE void choose_experts(const Float4 (&float4s)[N], ExpertChoice<S>* choice) {
    static_assert(S::kPlaces <= platform::kWarpSize, "a thread for each chosen expert");
    // Minus infinity, and NaN.
    const float kLast = platform::bit_cast<float>(0xff800000u);
    const float kNan = platform::bit_cast<float>(0x7fc00000u);
    const uint32_t thread = warp().index();
    const auto expert_of = [&](uint32_t i) {
        return (thread + i / 4 * platform::kWarpSize) * 4 + i % 4;
    };
    float logits[4 * N];
    uint32_t orders[4 * N];  // 0: no expert, or a chosen one
    bool has_nan = false;
    KCCL_UNROLL
    for (uint32_t i = 0; i < 4 * N; ++i) {
        logits[i] = float4s[i / 4].value[i % 4];
        has_nan = has_nan || logits[i] != logits[i];
        if (logits[i] != logits[i]) logits[i] = kLast;
        orders[i] = expert_of(i) < S::kExperts ? order_of(logits[i]) : 0;
    }
    uint32_t expert = ~0u;  // the one that this thread writes
    float logit = kLast, most = 0;
#pragma unroll 1
    for (uint32_t turn = 0; turn < S::kPlaces; ++turn) {
        uint32_t best = 0, complement = 0;
        KCCL_UNROLL
        for (const uint32_t order : orders) best = order > best ? order : best;
        best = most_of_warp(best);
        KCCL_UNROLL
        for (uint32_t i = 4 * N; i-- > 0;) {
            if (orders[i] == best) complement = ~expert_of(i);
        }
        const uint32_t chosen = ~most_of_warp(complement);
        KCCL_UNROLL
        for (uint32_t i = 0; i < 4 * N; ++i) {
            if (expert_of(i) == chosen) orders[i] = 0;
        }
        if (turn == thread) {
            expert = chosen;
            logit = logit_of(best);
        }
        if (turn == 0) most = logit_of(best);
    }
    // Chosen experts have places in the order of their numbers.
    uint32_t place = 0;
    KCCL_UNROLL
    for (uint32_t each = 0; each < S::kPlaces; ++each) {
        if (platform::shuffle_word(expert, each) < expert) ++place;
    }
    if (thread < S::kPlaces) {
        mem::store_plain(&choice->expert[place], expert);
        mem::store_plain(&choice->share[place], exponential(logit - most));
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
