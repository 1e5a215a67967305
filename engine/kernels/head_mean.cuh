// Stages the mean of all residuals, which the head multiplies, in a kernel with several columns.
// With one column each block computes all of it (stage_mean). With several, reading all of their
// residuals twice in each block would take longer than one more exchange. So each block computes a
// share of one column's mean. The blocks exchange the shares as plain float4s behind fences,
// because a mean uses every bit of a word, so that none is left for a flag.
#pragma once

#include "math.cuh"
#include "vectors.cuh"

namespace kccl::decode {

// Each column needs a block that computes its mean.
template <class S>
constexpr bool kSharesMean = S::kColumns > 1 && S::kWorldSize == 1 &&
                             (S::kNumResiduals > S::kNumHeadParts) && (S::kBlocks >= S::kColumns);

// Returns the slot of float4 `row` of residual `each` behind the last module.
template <class S>
KCCL_DECODE uint32_t slot_of_last(uint32_t each, uint32_t row, uint32_t column) {
    return Slots<S>::in_column(Slots<S>::residual(Shape<S>::kModules - 1, each) + row, column);
}

// Adds up the squares of a column's residuals, as stage_mean() does.
template <class M, class S>
KCCL_DECODE void square_residuals(ConsumerWarp<S>& consumer, uint32_t column) {
    constexpr uint32_t kEach = ceil_div(M::kFloat4s, platform::kWarpSize);
    // A thread waits for so many residuals at the same time.
    constexpr uint32_t kNum = least_of(columns_at_once<S>(kEach), S::kNumResiduals);
    const uint32_t first = first_float4<M>(consumer);
#pragma unroll 1
    for (uint32_t each = 0; each < S::kNumResiduals; each += kNum) {
        Float4 float4s[kNum * kEach];
        uint32_t slots[kNum * kEach], wanted = 0;
        KCCL_UNROLL
        for (uint32_t k = 0; k < kNum * kEach; ++k) {
            const uint32_t i = consumer.thread() + k % kEach * platform::kWarpSize;
            const bool is_there = i < M::kFloat4s && first + i < M::kColumns / 4 &&
                                  each + k / kEach < S::kNumResiduals;
            wanted |= is_there ? 1u << k : 0;
            slots[k] = slot_of_last<S>(each + k / kEach, is_there ? first + i : 0, column);
        }
        consumer.template await<mem::Scope::kDevice>(slots, wanted, consumer.tag(column), float4s);
        KCCL_UNROLL
        for (uint32_t i = 0; i < kNum; ++i) {
            if (each + i >= S::kNumResiduals) break;
            store_squares<kEach>(consumer, float4s + i * kEach,
                                 column * S::kNumResiduals + each + i);
        }
    }
}

// Returns where a column's mean lies in the exchange buffer.
template <class S>
KCCL_DECODE Float4* mean_at(const ConsumerWarp<S>& consumer, uint32_t column) {
    return reinterpret_cast<Float4*>(consumer.in_exchange_buffer(
        consumer.comm().rank, Slots<S>::kMeans + column * Slots<S>::kVector));
}

// Stores a share of a column's mean in the exchange buffer. All warps have met since
// square_residuals().
template <class S>
KCCL_DECODE void store_mean(ConsumerWarp<S>& consumer, uint32_t column, const Cut& share) {
    for (uint32_t start = consumer.warp_index() * platform::kWarpSize; start < share.num;
         start += Shape<S>::kConsumerThreads) {
        const uint32_t i = start + consumer.thread();
        const uint32_t row = share.first + (i < share.num ? i : 0);
        uint32_t slots[S::kNumResiduals];
        Float4 float4s[S::kNumResiduals];
        KCCL_UNROLL
        for (uint32_t each = 0; each < S::kNumResiduals; ++each) {
            slots[each] = slot_of_last<S>(each, row, column);
        }
        consumer.template await<mem::Scope::kDevice, false>(slots, i < share.num ? ~0u : 0,
                                                            consumer.tag(column), float4s);
        Float4 mean = {};
        KCCL_UNROLL
        for (uint32_t each = 0; each < S::kNumResiduals; ++each) {
            const float inverse = inverse_rms(consumer, column * S::kNumResiduals + each);
            KCCL_UNROLL
            for (int j = 0; j < 4; ++j) mean.value[j] += float4s[each].value[j] * inverse;
        }
        if (i >= share.num) continue;
        const Float4 weights = load_float4(consumer.task().norms,
                                           uint64_t{Shape<S>::kModules} * (S::kHidden / 4) + row);
        KCCL_UNROLL
        for (int j = 0; j < 4; ++j) {
            mean.value[j] = mean.value[j] * weights.value[j] / S::kNumResiduals;
        }
        mem::store_plain(mean_at(consumer, column) + row, mean);
    }
}

// Stages the mean of all residuals for each column. Called by all consumer warps. Returns false if
// a wait failed.
template <class M, class S>
KCCL_DECODE bool stage_shared_mean(ConsumerWarp<S>& consumer) {
    constexpr uint32_t kEach = ceil_div(M::kFloat4s, platform::kWarpSize);
    const uint32_t num = consumer.num_columns(), column = consumer.block() % num;
    const uint32_t share = consumer.block() / num, shares = S::kBlocks / num;
    if (share < shares) {
        square_residuals<M>(consumer, column);
        if (!consumer.meet()) return false;
        store_mean(consumer, column, cut(Slots<S>::kVector, share, shares));
        mem::finish_stores();
    }
    if (!consumer.meet()) return false;
    if (consumer.warp_index() == 0) {
        const uint32_t tag = consumer.tag(kMeanUse);
        if (leads(warp())) {
            mem::fence<mem::Order::kRelease, mem::Scope::kDevice>();
            consumer.publish_to_all(Slots<S>::kHaveMeans + consumer.block(), Float4{}, tag);
        }
        Float4 float4s[ConsumerWarp<S>::kOfAll];
        (void)consumer.template await_all<false>(Slots<S>::kHaveMeans, tag, float4s);
        mem::fence<mem::Order::kAcquire, mem::Scope::kDevice>();
    }
    consumer.count_shared_mean();
    if (!consumer.meet()) return false;
    constexpr uint32_t kNum = columns_at_once<S>(kEach);
    const uint32_t first = first_float4<M>(consumer);
    consumer.template for_columns<kNum>([&](uint32_t begin) {
        Float4 means[kNum * kEach];
        KCCL_UNROLL
        for (uint32_t k = 0; k < kNum * kEach; ++k) {
            const uint32_t i = consumer.thread() + k % kEach * platform::kWarpSize;
            const bool is_there = i < M::kFloat4s && first + i < M::kColumns / 4 &&
                                  is_used(consumer, begin + k / kEach);
            means[k] = Float4{};
            if (!is_there) continue;
            means[k] = mem::load_plain(mean_at(consumer, begin + k / kEach) + first + i);
        }
        KCCL_UNROLL
        for (uint32_t k = 0; k < kNum * kEach; ++k) {
            const uint32_t i = consumer.thread() + k % kEach * platform::kWarpSize;
            if (i < M::kFloat4s && is_used(consumer, begin + k / kEach)) {
                stage<M>(consumer, i, means[k], begin + k / kEach);
            }
        }
    });
    return true;
}

}  // namespace kccl::decode
