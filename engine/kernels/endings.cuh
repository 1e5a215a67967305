// The control words with which all blocks of all ranks wait for each other at the end of a token
// step. They say what each block has found, and what its host wants.
#pragma once

#include "head.cuh"

namespace kccl::decode {

// What a block tells all others at the end of a token step, in a control word: its most likely
// token, whether a value was NaN, and whether its host has cancelled the request. Only block 0 of a
// rank checks whether its host has cancelled, and whether a key or value was NaN (bad_request_at).
struct Ending {
    Best best;
    bool is_cancelled;
    bool ends_round = false;  // with seats (seats.cuh): whether the host has asked for that
    bool lacks_mask = false;  // with seats: whether the request's mask has not come (mask.cuh)
};

constexpr uint32_t kIsCancelled = 2, kEndsRound = 4, kLacksMask = 8;

KCCL_DECODE ControlWord control_word_of(const Ending& ending) {
    return {{platform::bit_cast<uint32_t>(ending.best.score),
             static_cast<uint32_t>(ending.best.id + 1), 0},
            (ending.best.is_nan ? 1u : 0) | (ending.is_cancelled ? kIsCancelled : 0) |
                (ending.ends_round ? kEndsRound : 0)};
}

KCCL_DECODE Ending ending_of(const ControlWord& control) {
    return {{platform::bit_cast<float>(control.word[0]), static_cast<int32_t>(control.word[1]) - 1,
             (control.small & 1u) != 0},
            (control.small & kIsCancelled) != 0};
}

KCCL_DECODE Best best_of_warp(Best best) {
    KCCL_UNROLL
    for (uint32_t step = platform::kWarpSize / 2; step > 0; step /= 2) {
        const uint32_t other = warp().index() ^ step;
        const uint32_t score =
            platform::shuffle_word(platform::bit_cast<uint32_t>(best.score), other);
        const uint32_t id = platform::shuffle_word(static_cast<uint32_t>(best.id), other);
        const uint32_t is_nan = platform::shuffle_word(best.is_nan ? 1u : 0u, other);
        best = better(
            best, Best{platform::bit_cast<float>(score), static_cast<int32_t>(id), is_nan != 0});
    }
    return best;
}

// Tells whether the host has asked for the end of a request or, with seats, of the round.
KCCL_DECODE bool is_asked_to_end(const Task& task) {
    const auto* const mailbox = reinterpret_cast<const Mailbox*>(task.mailbox);
    return mem::load<mem::Order::kRelaxed, mem::Scope::kSystem>(&mailbox->cancelled) == task.number;
}

// Returns the first column of a token step whose logits may be used to choose a token: of a
// request's own ids only the last can.
template <class S>
KCCL_DECODE uint32_t first_choosing(const ConsumerWarp<S>& consumer, uint32_t position) {
    if constexpr (S::kColumns == 1) return 0;
    return position < consumer.task().num_ids ? consumer.num_columns() - 1 : 0;
}

// Adds what one block tells to what others have told.
KCCL_DECODE void combine(Ending* all, const Ending& one) {
    all->best = better(all->best, one.best);
    all->is_cancelled |= one.is_cancelled;
}

// Waits for this warp's share of the control words of all blocks of all ranks, and leaves their
// combination in shared memory. The warps share them because a thread that loads many has to do it
// in several turns, each of which takes a trip to the L2 cache. Called by all consumer warps.
template <class S>
KCCL_DECODE void collect_endings(ConsumerWarp<S>& consumer) {
    constexpr uint32_t kEach = ceil_div(S::kWorldSize * S::kBlocks, Shape<S>::kConsumerThreads);
    consumer.template for_columns<1>([&](uint32_t column) {
        const uint32_t number = consumer.number_of_end(column);
        const uint32_t first = Slots<S>::in_column(Slots<S>::end(number, 0, 0), column);
        Float4 float4s[kEach];
        uint32_t slots[kEach], wanted = 0;
        KCCL_UNROLL
        for (uint32_t k = 0; k < kEach; ++k) {
            const uint32_t at =
                (k * S::kWarps + consumer.warp_index()) * platform::kWarpSize + consumer.thread();
            const bool is_there = at < S::kWorldSize * S::kBlocks;
            wanted |= is_there ? 1u << k : 0;
            slots[k] = first + (is_there ? at : 0);
        }
        consumer.template await<ConsumerWarp<S>::kReach, false>(slots, wanted, tag_of_end(number),
                                                                float4s, (1u << S::kWorldSize) - 1);
        // All columns' control words are behind the same release of their block.
        if (column == 0) mem::fence<mem::Order::kAcquire, ConsumerWarp<S>::kReach>();
        Ending all = {{0, -1, false}, false};
        KCCL_UNROLL
        for (uint32_t k = 0; k < kEach; ++k) {
            if ((wanted >> k & 1u) == 0) continue;
            const ControlWord control = control_word_of(float4s[k]);
            combine(&all, ending_of(control));
        }
        all.best = best_of_warp(all.best);
        all.is_cancelled = platform::warp_any(all.is_cancelled);
        if (leads(warp())) {
            mem::store_plain(&consumer.shared().endings[consumer.warp_index()][column],
                             control_word_of(all));
        }
    });
}

// Publishes the block's control words of all columns, each by a thread of warp 0: its most likely
// token. What ends the request (cancelled, bad: numbers of requests, as the first thread knows
// them) is in that of the first column that chooses a token. All warps have met.
template <class S>
KCCL_DECODE void publish_endings(ConsumerWarp<S>& consumer, uint32_t first, uint32_t cancelled,
                                 uint32_t bad) {
    const uint32_t column = consumer.thread(), request = consumer.task().number;
    const bool is_bad = platform::shuffle_word(bad, 0) == request;
    const bool is_cancelled = platform::shuffle_word(cancelled, 0) == request;
    Ending mine = {{0, -1, column == first && is_bad}, column == first && is_cancelled};
    if (column >= consumer.num_columns()) return;
    for (uint32_t each = 0; each < S::kWarps; ++each) {
        const ControlWord one = mem::load_plain(&consumer.shared().best[each][column]);
        mine.best = better(mine.best, ending_of(one).best);
    }
    // As where there is one column (finish).
    mem::fence<mem::Order::kRelease, ConsumerWarp<S>::kReach>();
    const uint32_t number = consumer.number_of_end(column);
    const uint32_t slot = Slots<S>::end(number, consumer.comm().rank, consumer.block());
    consumer.publish_to_all(Slots<S>::in_column(slot, column), float4_of(control_word_of(mine)),
                            tag_of_end(number));
}

// Combines all blocks' control words of a column. All warps combine the same ones, so that all of
// them get the same result.
template <class S>
KCCL_DECODE void combine_column(const Shared<S>& shared, uint32_t column, Ending* all) {
    KCCL_UNROLL
    for (uint32_t each = 0; each < S::kWarps; ++each) {
        const ControlWord control = mem::load_plain(&shared.endings[each][column]);
        combine(all, ending_of(control));
    }
    // A kernel that leaves out a part of the work, to measure its cost (S::kAblated), has
    // meaningless logits. It goes on with id 0 and ignores NaN.
    if constexpr (S::kAblated != 0) all->best = {0, 0, false};
}

// Stores the warp's most likely token of each column in shared memory.
template <class S>
KCCL_DECODE void store_bests(ConsumerWarp<S>& consumer, const Bests<S, false>& best) {
    const Best mine = best_of_warp(best);
    if (leads(warp())) {
        mem::store_plain(&consumer.shared().best[consumer.warp_index()][0],
                         control_word_of(Ending{mine, false}));
    }
}
template <class S>
KCCL_DECODE void store_bests(ConsumerWarp<S>& consumer, const Bests<S, true>& best) {
    KCCL_UNROLL
    for (uint32_t column = 0; column < S::kColumns; ++column) {
        if (!is_used(consumer, column)) break;
        const Best mine = best_of_warp(best.of[column]);
        if (leads(warp())) {
            mem::store_plain(&consumer.shared().best[consumer.warp_index()][column],
                             control_word_of(Ending{mine, false}));
        }
    }
}

}  // namespace kccl::decode
