// Ends a token step with seats (seats.cuh): all blocks of all ranks wait for each other, and learn
// each request's next token. A warp waits for the control words of one column, samples its token if
// need be, and decides about its request. So the columns' waits and choices run at the same time.
#pragma once

#include "finish.cuh"

namespace kccl::decode {

// Reads what ends the requests of a token step: their hosts' wishes, and NaN in a prompt's keys or
// values. Only a warp of block 0 does. It reads host memory, so it does so at the token step's
// beginning, and not at its end, where all blocks wait for it. Called by all threads of a warp.
template <class S>
KCCL_DECODE void ask_hosts(ConsumerWarp<S>& consumer) {
    const uint32_t column = consumer.thread();
    if (consumer.block() != 0 || consumer.warp_index() != 0 || column >= consumer.num_columns()) {
        return;
    }
    const Task& task = consumer.task();
    const Task& seat = task_of<S>(task, column);
    const bool is_bad = mem::load<mem::Order::kRelaxed, mem::Scope::kDevice>(
                            bad_request_at<S>(task, consumer.comm().rank)) == seat.number;
    const bool is_cancelled = is_asked_to_end(seat), ends_round = is_asked_to_end(task);
    mem::store_plain(&consumer.shared().wishes[column],
                     control_word_of(Ending{{0, -1, is_bad}, is_cancelled, ends_round}).small);
}

// Publishes the block's control words of all columns, each by a thread of warp 0. Block 0 first
// waits for masks (await_masks). All warps must have met.
template <class S>
KCCL_DECODE void publish_seats(ConsumerWarp<S>& consumer, [[maybe_unused]] uint32_t turn) {
    const uint32_t column = consumer.thread();
    uint32_t lacks = 0;
    if constexpr (S::kSamples) {
        if (consumer.block() == 0) lacks = await_masks(consumer, turn);
    }
    if (column >= consumer.num_columns()) return;
    Ending mine = {{0, -1, false}, false};
    for (uint32_t each = 0; each < S::kWarps; ++each) {
        const ControlWord one = mem::load_plain(&consumer.shared().best[each][column]);
        mine.best = better(mine.best, ending_of(one).best);
    }
    ControlWord word = control_word_of(mine);
    if (consumer.block() == 0) {
        word.small |= mem::load_plain(&consumer.shared().wishes[column]) | lacks;
    }
    // As where there is one column (finish).
    mem::fence<mem::Order::kRelease, ConsumerWarp<S>::kReach>();
    const uint32_t number = consumer.number_of_end(column);
    const uint32_t slot = Slots<S>::end(number, consumer.comm().rank, consumer.block());
    consumer.publish_to_all(Slots<S>::in_column(slot, column), float4_of(word), tag_of_end(number));
}

// Waits for a column's control words of all blocks of all ranks, and returns their combination.
// Called by all threads of a warp.
template <class S>
KCCL_DECODE Ending await_ending(ConsumerWarp<S>& consumer, uint32_t column) {
    const uint32_t number = consumer.number_of_end(column);
    const uint32_t first = Slots<S>::in_column(Slots<S>::end(number, 0, 0), column);
    Float4 float4s[ConsumerWarp<S>::kOfAll];
    const uint32_t wanted = consumer.template await_all<false>(first, tag_of_end(number), float4s);
    mem::fence<mem::Order::kAcquire, ConsumerWarp<S>::kReach>();
    Ending all = {{0, -1, false}, false};
    KCCL_UNROLL
    for (uint32_t k = 0; k < ConsumerWarp<S>::kOfAll; ++k) {
        if ((wanted >> k & 1u) == 0) continue;
        const ControlWord control = control_word_of(float4s[k]);
        combine(&all, ending_of(control));
        all.ends_round |= (control.small & kEndsRound) != 0;
        all.lacks_mask |= (control.small & kLacksMask) != 0;
    }
    all.best = best_of_warp(all.best);
    all.is_cancelled = platform::warp_any(all.is_cancelled);
    all.ends_round = platform::warp_any(all.ends_round);
    all.lacks_mask = platform::warp_any(all.lacks_mask);
    // As combine_column() does.
    if constexpr (S::kAblated != 0) all.best = {0, 0, false};
    return all;
}

// Tells whether a column's token is sampled.
template <class S>
KCCL_DECODE bool is_sampled(const ConsumerWarp<S>& consumer, const Ending& all, uint32_t column) {
    if constexpr (!S::kSamples) return false;
    return !all.is_cancelled && !all.best.is_nan && all.best.id >= 0 &&
           !is_greedy(task_of<S>(consumer.task(), column));
}

// Does what finish() does. Ends the round behind this token step if a request ends, or if the host
// has asked for it. turn: the number of the token step.
template <class S>
KCCL_DECODE bool finish_seats(ConsumerWarp<S>& consumer, uint32_t turn, const Bests<S>& best,
                              Verdict* verdict) {
    Shared<S>& shared = consumer.shared();
    consumer.stamp(kKcclDecodeBegan);
    store_bests(consumer, best);
    mem::finish_stores();
    if (!consumer.meet()) return false;
    if (consumer.warp_index() == 0) publish_seats(consumer, turn);
    consumer.stamp(kKcclDecodeArrived);
#pragma unroll 1
    for (uint32_t column = consumer.warp_index(); column < consumer.num_columns();
         column += S::kWarps) {
        const Ending all = await_ending(consumer, column);
        if constexpr (S::kSamples) {
            if (all.lacks_mask && !all.is_cancelled) {
                // The request has no token of this token step.
                if (leads(warp())) {
                    mem::store_plain(&shared.verdicts[column], uint32_t{kKcclEngineMaxTokens});
                }
                continue;
            }
        }
        Chosen chosen = {all.best.id, platform::bit_cast<float>(uint32_t{kNoNumber})};
        if constexpr (S::kSamples) {
            if (is_sampled(consumer, all, column)) {
                const uint32_t position = position_of<S>(consumer.task(), turn, column);
                Sampler<S, OneWarp> sampler(consumer, position + 1, all.best.score, column);
                if (!sampler.choose(&chosen)) break;
            }
        }
        judge(consumer, turn, all, chosen, column, 0);
    }
    consumer.stamp(kKcclDecodeMultiplied);
    // If a warp's wait has failed in its choice, meet() returns false in all warps.
    if (!consumer.meet()) return false;
    for (uint32_t column = 0; column < consumer.num_columns(); ++column) {
        if (mem::load_plain(&shared.verdicts[column]) != kKcclEngineGoesOn) {
            verdict->end = kKcclEngineMaxTokens;
        }
    }
    consumer.end_columns(1, consumer.num_columns());
    consumer.end_op();
    consumer.next_token_step();
    return true;
}

}  // namespace kccl::decode
