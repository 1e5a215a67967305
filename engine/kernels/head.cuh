// The last norm, the mean over the lanes unless the head has a part for each, and the head: this
// rank's part of the logits.
#pragma once

#include "math.cuh"
#include "vectors.cuh"

namespace kccl::decode {

// A block's, or the model's, most likely token so far.
struct Best {
    float score;
    int32_t id;  // -1: none yet, or a logit is not a number
    bool is_nan;
};

KCCL_DEVICE Best better(const Best& a, const Best& b) {
    const bool takes_b =
        b.id >= 0 && (a.id < 0 || b.score > a.score || (b.score == a.score && b.id < a.id));
    Best best = takes_b ? b : a;
    best.is_nan = a.is_nan || b.is_nan;
    return best;
}

// Stages the mean over all residuals of what their norms give. They come from all ranks, and are
// read twice: first for their squares. False: a wait failed.
template <class M, class S>
KCCL_DEVICE bool stage_mean(Worker<S>& worker) {
    constexpr uint32_t kEach = ceil_div(M::kQuads, platform::kWarpSize);
    const uint32_t first = first_quad<M>(worker);
    Quad mean[kEach] = {};
#pragma unroll 1
    for (uint32_t sweep = 0; sweep < 2; ++sweep) {
#pragma unroll 1
        for (uint32_t each = 0; each < S::kNumResiduals; ++each) {
            Quad quads[kEach];
            uint32_t places[kEach], wanted = 0;
            KCCL_UNROLL
            for (uint32_t k = 0; k < kEach; ++k) {
                const uint32_t i = worker.thread() + k * platform::kWarpSize;
                const bool is_there = i < M::kQuads && first + i < M::kColumns / 4;
                wanted |= is_there ? 1u << k : 0;
                places[k] =
                    Places<S>::residual(Shape<S>::kModules - 1, each) + (is_there ? first + i : 0);
            }
            worker.template await<Worker<S>::kReach>(places, wanted, tag_of(worker.round()), quads,
                                                     1u << Shape<S>::rank_of(each));
            if (sweep == 0) {
                store_squares(worker, quads, each);
                continue;
            }
            const float inverse = inverse_rms(worker, each);
            KCCL_UNROLL
            for (uint32_t k = 0; k < kEach; ++k) {
                KCCL_UNROLL
                for (int j = 0; j < 4; ++j) mean[k].value[j] += quads[k].value[j] * inverse;
            }
        }
        if (sweep == 0 && !worker.meet()) return false;
    }
    KCCL_UNROLL
    for (uint32_t k = 0; k < kEach; ++k) {
        const uint32_t i = worker.thread() + k * platform::kWarpSize;
        if (i >= M::kQuads) continue;
        const uint32_t at = first + i < M::kColumns / 4 ? first + i : 0;
        const Quad weights =
            load_quad(worker.task().norms, uint64_t{2 * S::kNumLayers} * (S::kHidden / 4) + at);
        KCCL_UNROLL
        for (int j = 0; j < 4; ++j) {
            mean[k].value[j] = mean[k].value[j] * weights.value[j] / S::kNumResiduals;
        }
        stage<M>(worker, i, mean[k]);
    }
    return true;
}

// Makes the logits of this block's rows; *best becomes the most likely token among this thread's.
// Called by all warps that multiply. False: a wait failed.
template <class S>
KCCL_DEVICE bool head(Worker<S>& worker, uint32_t position, Best* best) {
    using Dims = Shape<S>;
    using M = typename Dims::Head;
    const Cut tiles = Dims::head_tiles_of(worker.block());
    const uint32_t first_id = Dims::first_head_row_of(worker.comm().rank);
    const Task& task = worker.task();
    constexpr bool kHasMean = S::kNumResiduals > S::kNumHeadParts;
    worker.next_op();
    if constexpr (kHasMean) {
        if (!stage_mean<M>(worker)) return false;
    } else {
        stage_residual<M>(worker, Dims::kModules - 1, 2 * S::kNumLayers, 0);
    }
    worker.stamp(kKcclDecodeArrived);
    float inverse = 1;
    for (uint32_t first = 0; first < tiles.num; first += Dims::kHeadTiles) {
        const uint32_t rest = tiles.num - first;
        const uint32_t num = rest < Dims::kHeadTiles ? rest : Dims::kHeadTiles;
        if (first != 0) worker.next_area();
        multiply(worker, steps_of<M>(num), FirstStage<S>{});
        worker.stamp(kKcclDecodeMultiplied);
        if (!worker.meet()) return false;
        worker.stamp(kKcclDecodeMet);
        if (!kHasMean && first == 0) inverse = inverse_rms(worker);
        for (uint32_t k = 0; k < ceil_div(Dims::kHeadTiles * kTileQuads, Dims::kConsumers); ++k) {
            const uint32_t quad = own_quad(worker, k);
            if (quad >= num * kTileQuads) break;
            Quad total = total_of(worker, quad / kTileQuads, quad % kTileQuads);
            const uint32_t row = (tiles.first + first) * kTileQuads + quad;
            for (uint32_t i = 0; i < 4; ++i) {
                total.value[i] *= inverse;
                const float score = total.value[i];
                *best = better(*best, Best{score, static_cast<int32_t>(first_id + row * 4 + i),
                                           !is_finite(score)});
            }
            if constexpr (S::kSamples) {
                mem::store_plain(reinterpret_cast<Quad*>(task.own_logits) + row, total);
            }
            if (task.logits[0] == 0) continue;
            const uint64_t at = uint64_t{position - task.start} * (S::kVocab / 4);
            for (uint32_t rank = 0; rank < S::kWorldSize; ++rank) {
                // The end of the round orders it before the end of any rank's kernel.
                auto* const logits = reinterpret_cast<Quad*>(task.logits[rank]);
                mem::store_plain(logits + at + first_id / 4 + row, total);
            }
        }
    }
    worker.end_op();
    return true;
}

}  // namespace kccl::decode
