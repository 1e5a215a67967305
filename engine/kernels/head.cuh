// Computes this rank's part of the logits: the last norm, then the head. Between these two the
// lanes' vectors are averaged, unless each lane has its own part of the head.
#pragma once

#include "head_mean.cuh"

namespace kccl::decode {

// The best token so far: of a thread, a warp, a block, or all ranks. NUMBER: a float if the score
// is a logit, a double where it may be the key of a sampled token (sample.cuh).
template <class NUMBER>
struct BestOf {
    NUMBER score;
    int32_t id;   // -1 before the first token
    bool is_nan;  // a logit is not finite, or a key or value is NaN (finish.cuh)
};
// The most likely token so far.
using Best = BestOf<float>;

template <class NUMBER>
KCCL_DECODE BestOf<NUMBER> better(const BestOf<NUMBER>& a, const BestOf<NUMBER>& b) {
    const bool takes_b =
        b.id >= 0 && (a.id < 0 || b.score > a.score || (b.score == a.score && b.id < a.id));
    BestOf<NUMBER> best = takes_b ? b : a;
    best.is_nan = a.is_nan || b.is_nan;
    return best;
}

// The most likely token of each column. Where there is one column, it is a single one.
template <class S, bool HAS_COLUMNS = (S::kColumns > 1)>
struct Bests : Best {};
template <class S>
struct Bests<S, true> {
    Best of[S::kColumns];
};
template <class S>
KCCL_DECODE Bests<S> no_bests() {
    if constexpr (S::kColumns == 1) {
        return {{0, -1, false}};
    } else {
        Bests<S> bests;
        KCCL_UNROLL
        for (Best& each : bests.of) each = {0, -1, false};
        return bests;
    }
}
template <class S>
KCCL_DECODE void add_best(Bests<S, false>* bests, uint32_t, const Best& one) {
    static_cast<Best&>(*bests) = better<float>(*bests, one);
}
// The array stays in registers, because its index is known at compile time.
template <class S>
KCCL_DECODE void add_best(Bests<S, true>* bests, uint32_t column, const Best& one) {
    KCCL_UNROLL
    for (uint32_t c = 0; c < S::kColumns; ++c) {
        if (column == c) bests->of[c] = better(bests->of[c], one);
    }
}

// Waits for the residuals of all ranks, and stages the mean over all of them, each normalised
// first, as the head's vector, for NUM columns from `column` on. The residuals are read twice:
// first to sum up their squares, then to add up the mean. Returns false if a wait failed.
template <class M, uint32_t NUM, class S>
KCCL_DECODE bool stage_mean(ConsumerWarp<S>& consumer, uint32_t column) {
    constexpr uint32_t kEach = ceil_div(M::kFloat4s, platform::kWarpSize);
    const uint32_t first = first_float4<M>(consumer);
    Float4 mean[NUM * kEach] = {};
#pragma unroll 1
    for (uint32_t sweep = 0; sweep < 2; ++sweep) {
#pragma unroll 1
        for (uint32_t each = 0; each < S::kNumResiduals; ++each) {
            Float4 float4s[NUM * kEach];
            uint32_t slots[NUM * kEach], wanted = 0;
            KCCL_UNROLL
            for (uint32_t k = 0; k < NUM * kEach; ++k) {
                const uint32_t i = consumer.thread() + k % kEach * platform::kWarpSize;
                const bool is_there = i < M::kFloat4s && first + i < M::kColumns / 4 &&
                                      is_used(consumer, column + k / kEach);
                wanted |= is_there ? 1u << k : 0;
                slots[k] = Slots<S>::in_column(
                    Slots<S>::residual(Shape<S>::kModules - 1, each) + (is_there ? first + i : 0),
                    column + k / kEach);
            }
            consumer.template await<ConsumerWarp<S>::kReach>(
                slots, wanted, consumer.template tags<kEach>(column), float4s,
                1u << Shape<S>::rank_of(each));
            if (sweep == 0) {
                KCCL_UNROLL
                for (uint32_t i = 0; i < NUM; ++i) {
                    if (!is_used(consumer, column + i)) break;
                    store_squares<kEach>(consumer, float4s + i * kEach,
                                         (column + i) * S::kNumResiduals + each);
                }
                continue;
            }
            float inverse = 0;
            KCCL_UNROLL
            for (uint32_t k = 0; k < NUM * kEach; ++k) {
                if (k % kEach == 0) {
                    if (!is_used(consumer, column + k / kEach)) break;
                    inverse = inverse_rms(consumer, (column + k / kEach) * S::kNumResiduals + each);
                }
                KCCL_UNROLL
                for (int j = 0; j < 4; ++j) mean[k].value[j] += float4s[k].value[j] * inverse;
            }
        }
        if (sweep == 0 && !consumer.meet()) return false;
    }
    KCCL_UNROLL
    for (uint32_t k = 0; k < NUM * kEach; ++k) {
        const uint32_t i = consumer.thread() + k % kEach * platform::kWarpSize;
        if (i >= M::kFloat4s || !is_used(consumer, column + k / kEach)) continue;
        const uint32_t at = first + i < M::kColumns / 4 ? first + i : 0;
        const Float4 weights = load_float4(consumer.task().norms,
                                           uint64_t{Shape<S>::kModules} * (S::kHidden / 4) + at);
        KCCL_UNROLL
        for (int j = 0; j < 4; ++j) {
            mean[k].value[j] = mean[k].value[j] * weights.value[j] / S::kNumResiduals;
        }
        stage<M>(consumer, i, mean[k], column + k / kEach);
    }
    return true;
}

// If the kernel samples, a rank keeps the newest logits of each column. Returns how many float4s a
// column has there.
template <class S>
KCCL_CONSTEXPR uint32_t own_logits_of_column() {
    constexpr uint32_t kParts = Shape<S>::kHasHeadParts ? Shape<S>::kLanesHere : 1;
    return kParts * (S::kVocab / Shape<S>::kHeadParts / 4);
}
// Returns where those of a column begin.
template <class S>
KCCL_DECODE uint64_t own_logits_at(const Task& task, uint32_t column) {
    if constexpr (S::kColumns == 1) return task.own_logits;
    return task.own_logits + uint64_t{column} * own_logits_of_column<S>() * sizeof(Float4);
}

// Computes the logits of this block's rows, and stores them where the task wants them. *best
// becomes the most likely tokens among this thread's logits. position: that of column 0.
// Called by all consumer warps. Returns false if a wait failed.
template <class S>
KCCL_DECODE bool head(ConsumerWarp<S>& consumer, uint32_t position, Bests<S>* best) {
    using Dims = Shape<S>;
    using M = typename Dims::Head;
    const Cut tiles = Dims::head_tiles_of(consumer.block());
    const uint32_t first_id = Dims::first_head_row_of(consumer.comm().rank);
    const Task& task = consumer.task();
    constexpr bool kHasMean = S::kNumResiduals > S::kNumHeadParts;
    consumer.next_op();
    if constexpr (kSharesMean<S>) {
        if (!stage_shared_mean<M>(consumer)) return false;
    } else if constexpr (kHasMean) {
        constexpr uint32_t kNum = columns_at_once<S>(ceil_div(M::kFloat4s, platform::kWarpSize));
        bool has_failed = false;
        consumer.template for_columns<kNum>([&](uint32_t column) {
            has_failed = has_failed || !stage_mean<M, kNum>(consumer, column);
        });
        if (has_failed) return false;
    } else {
        stage_residual<M>(consumer, Dims::kModules - 1, Dims::kModules, 0);
    }
    consumer.stamp(kKcclDecodeArrived);
    // 1 / the root of the mean square of each column's residual, unless the mean is multiplied.
    float inverses[S::kColumns];
    for (float& inverse : inverses) inverse = 1;
    for (uint32_t first = 0; first < tiles.num; first += Dims::kHeadTiles) {
        const uint32_t rest = tiles.num - first;
        const uint32_t num = rest < Dims::kHeadTiles ? rest : Dims::kHeadTiles;
        if (first != 0) consumer.next_area();
        with_format<S>(Product<S>::kHead, Multiply<S>{consumer, steps_of<M>(num), FirstStage<S>{}});
        consumer.stamp(kKcclDecodeMultiplied);
        if (!consumer.meet()) return false;
        consumer.stamp(kKcclDecodeMet);
        if (!kHasMean && first == 0) {
            KCCL_UNROLL
            for (uint32_t column = 0; column < S::kColumns; ++column) {
                if (is_used(consumer, column)) {
                    inverses[column] = inverse_rms(consumer, column * S::kNumResiduals);
                }
            }
        }
        constexpr uint32_t kMost = Dims::kHeadTiles * kTileFloat4s;
        for (uint32_t k = 0; k < kMostOwnRows<S, kMost>; ++k) {
            const OwnRows rows = own_rows<kMost>(consumer, k);
            if (are_behind(consumer, rows, num * kTileFloat4s)) break;
            if (!has_rows(consumer, rows, num * kTileFloat4s)) continue;
            const uint32_t index4 = rows.index4, column = rows.column;
            Float4 total = total_of(consumer, index4 / kTileFloat4s, index4 % kTileFloat4s, column);
            const uint32_t row = (tiles.first + first) * kTileFloat4s + index4;
            // The array stays in registers, because its index is known at compile time.
            float inverse = inverses[0];
            KCCL_UNROLL
            for (uint32_t c = 1; c < S::kColumns; ++c)
                inverse = column == c ? inverses[c] : inverse;
            for (uint32_t i = 0; i < 4; ++i) {
                total.value[i] *= inverse;
                const float score = total.value[i];
                add_best(
                    best, column,
                    Best{score, static_cast<int32_t>(first_id + row * 4 + i), !is_finite(score)});
            }
            if constexpr (S::kSamples) {
                mem::store_plain(reinterpret_cast<Float4*>(own_logits_at<S>(task, column)) + row,
                                 total);
            }
            if (task.logits[0] == 0) continue;
            const uint64_t at = uint64_t{position + column - task.start} * (S::kVocab / 4);
            for (uint32_t rank = 0; rank < S::kWorldSize; ++rank) {
                // The fences at the end of the token step (finish.cuh) order this plain store
                // before the end of any rank's kernel.
                auto* const logits = reinterpret_cast<Float4*>(task.logits[rank]);
                mem::store_plain(logits + at + first_id / 4 + row, total);
            }
        }
    }
    consumer.end_op();
    return true;
}

}  // namespace kccl::decode
