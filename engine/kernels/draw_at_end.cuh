// Finds sampled tokens in the exchange that ends a token step, where the temperature alone decides.
//
// Such a token is the id with the largest key, score plus noise (sample.cuh). The block that has an
// id's logit knows its key without the others: noise follows from seed, position and id. So each
// block tells its best key in place of its largest logit, for all columns at the same time, and no
// exchange of sampling follows. Filters and log-probabilities need sums over all ids; penalties and
// masks depend on the tokens before.
#pragma once

#include "endings.cuh"
#include "gumbel.cuh"
#include "scores.cuh"

namespace kccl::decode {

// Tells whether a request's tokens are found so.
template <class S>
KCCL_DECODE bool is_drawn_at_end(const Task& task) {
    if constexpr (!kDrawsAtEnd<S>) return false;
    const Sampling& rules = task.sampling;
    return rules.temperature > 0 && (rules.top_k == 0 || rules.top_k >= S::kVocab) &&
           !(rules.top_p < 1) && !(rules.min_p > 0) && rules.wants_logprobs == 0 &&
           task.marks == 0 && task.counts == 0 && task.mask == 0;
}

// Goes over part `part` of `parts` of the block's logits of a column, and adds the best of this
// thread's ids to *best. position: that of the token. All warps must have met since the logits were
// stored. Called by all threads of a warp.
template <class S>
KCCL_DECODE void draw_part(const ConsumerWarp<S>& consumer, uint32_t position, uint32_t column,
                           uint32_t part, uint32_t parts, BestOf<double>* best) {
    const Task& task = consumer.task();
    const Cut tiles = Shape<S>::head_tiles_of(consumer.block());
    const uint32_t first_id = Shape<S>::first_head_row_of(consumer.comm().rank);
    const auto* const logits = reinterpret_cast<const float*>(own_logits_at<S>(task, column));
    const uint32_t begin = tiles.first * kTileRows, end = begin + tiles.num * kTileRows;
    double least = 0;
    bool knows_least = false;
#pragma unroll 1
    for (uint32_t first = begin + part * platform::kWarpSize; first < end;
         first += parts * platform::kWarpSize) {
        const uint32_t row = first + consumer.thread();
        const bool is_there = row < end;
        const uint32_t id = first_id + (is_there ? row : begin);
        const float logit = mem::load_plain(logits + (is_there ? row : begin));
        const Philox words = philox(task.sampling.seed, id / 4, position);
        uint32_t word = words.word[0];
        KCCL_UNROLL
        for (uint32_t i = 1; i < 4; ++i) word = id % 4 == i ? words.word[i] : word;
        const double score = score_of_row(task, logit, false, is_there ? row : begin);
        // Noise takes most of the time, so it is computed only where an id may become the best.
        const bool may_win = is_there && (!knows_least || score + most_noise(word) >= least);
        if (!platform::warp_any(may_win)) continue;
        if (is_there) {
            const BestOf<double> one = {score + gumbel(word), static_cast<int32_t>(id), false};
            *best = better(*best, one);
        }
        least = best_of_warp(*best).score;
        knows_least = true;
    }
}

// Returns a bit for each column: whether this thread has a logit of it that is not finite.
template <class S>
KCCL_DECODE uint32_t columns_with_nan(const Bests<S, false>& best) {
    return best.is_nan ? 1u : 0;
}
template <class S>
KCCL_DECODE uint32_t columns_with_nan(const Bests<S, true>& bests) {
    uint32_t columns = 0;
    KCCL_UNROLL
    for (uint32_t i = 0; i < S::kColumns; ++i) columns |= bests.of[i].is_nan ? 1u << i : 0;
    return columns;
}

// Does what store_bests() does, with the best keys of the columns from `first` on, among which the
// warps are shared out. position: that of column 0. All warps must have met since the logits were
// stored. Called by all of them.
template <class S>
KCCL_DECODE void store_drawn(ConsumerWarp<S>& consumer, const Bests<S>& bests, uint32_t position,
                             uint32_t first) {
    const uint32_t with_nan = columns_with_nan<S>(bests);
    const uint32_t num = consumer.num_columns() - first, warp = consumer.warp_index();
    // How many warps go over a column's logits.
    const uint32_t parts = num < S::kWarps ? S::kWarps / num : 1;
#pragma unroll 1
    for (uint32_t column = 0; column < consumer.num_columns(); ++column) {
        BestOf<double> best = {0, -1, (with_nan >> column & 1u) != 0};
        const uint32_t number = column - first;
        const bool has_it = parts > 1 ? warp % num == number : number % S::kWarps == warp;
        const uint32_t part = parts > 1 ? warp / num : 0;
        if (column >= first && has_it && part < parts) {
            draw_part<S>(consumer, position + column + 1, column, part, parts, &best);
        }
        store_best(consumer, best, column);
    }
}

}  // namespace kccl::decode
