// The control words with which all blocks of all ranks wait for each other at the end of a token
// step. They say what each block has found, and what its host wants.
#pragma once

#include "head.cuh"

namespace kccl::decode {

// What a block tells all others at the end of a token step, in a control word: its best token,
// whether a value was NaN, and whether its host has cancelled the request. Only block 0 of a rank
// checks whether its host has cancelled, and whether a key or value was NaN (bad_request_at).
template <class NUMBER>
struct EndingOf {
    BestOf<NUMBER> best;
    bool is_cancelled;
    bool ends_round = false;  // with seats (seats.cuh): whether the host has asked for that
    bool lacks_mask = false;  // with seats: whether the request's mask has not come (mask.cuh)
};
// The best token is the most likely one.
using Ending = EndingOf<float>;

// Whether this exchange also finds sampled tokens (draw_at_end.cuh), for which scores are doubles.
template <class S>
constexpr bool kDrawsAtEnd = S::kSamples && !S::kHasSeats;
template <bool IS_DRAWN>
struct EndNumber {
    using Type = float;
};
template <>
struct EndNumber<true> {
    using Type = double;
};
// What the kernel's blocks tell each other.
template <class S>
using EndingIn = EndingOf<typename EndNumber<kDrawsAtEnd<S>>::Type>;

constexpr uint32_t kIsCancelled = 2, kEndsRound = 4, kLacksMask = 8;

KCCL_DECODE ControlWord control_word_of(const Ending& ending) {
    return {{platform::bit_cast<uint32_t>(ending.best.score),
             static_cast<uint32_t>(ending.best.id + 1), 0},
            (ending.best.is_nan ? 1u : 0) | (ending.is_cancelled ? kIsCancelled : 0) |
                (ending.ends_round ? kEndsRound : 0)};
}

KCCL_DECODE ControlWord control_word_of(const EndingOf<double>& ending) {
    const auto score = platform::bit_cast<uint64_t>(ending.best.score);
    return {{static_cast<uint32_t>(score), static_cast<uint32_t>(score >> 32),
             static_cast<uint32_t>(ending.best.id + 1)},
            (ending.best.is_nan ? 1u : 0) | (ending.is_cancelled ? kIsCancelled : 0)};
}

KCCL_DECODE Ending ending_of(const ControlWord& control) {
    return {{platform::bit_cast<float>(control.word[0]), static_cast<int32_t>(control.word[1]) - 1,
             (control.small & 1u) != 0},
            (control.small & kIsCancelled) != 0};
}
// Sets *ending to what a control word of the kernel's blocks tells.
KCCL_DECODE void read_ending(const ControlWord& control, Ending* ending) {
    *ending = ending_of(control);
}
KCCL_DECODE void read_ending(const ControlWord& control, EndingOf<double>* ending) {
    *ending = {{platform::bit_cast<double>(control.word[0] | uint64_t{control.word[1]} << 32),
                static_cast<int32_t>(control.word[2]) - 1, (control.small & 1u) != 0},
               (control.small & kIsCancelled) != 0};
}
template <class S>
KCCL_DECODE EndingIn<S> ending_in(const ControlWord& control) {
    EndingIn<S> ending;
    read_ending(control, &ending);
    return ending;
}

KCCL_DECODE float shuffled(float number, uint32_t from) {
    const uint32_t bits = platform::bit_cast<uint32_t>(number);
    return platform::bit_cast<float>(platform::shuffle_word(bits, from));
}
KCCL_DECODE double shuffled(double number, uint32_t from) {
    const auto bits = platform::bit_cast<uint64_t>(number);
    const uint32_t low = platform::shuffle_word(static_cast<uint32_t>(bits), from);
    const uint32_t high = platform::shuffle_word(static_cast<uint32_t>(bits >> 32), from);
    return platform::bit_cast<double>(low | uint64_t{high} << 32);
}

template <class NUMBER>
KCCL_DECODE BestOf<NUMBER> best_of_warp(BestOf<NUMBER> best) {
    KCCL_UNROLL
    for (uint32_t step = platform::kWarpSize / 2; step > 0; step /= 2) {
        const uint32_t other = warp().index() ^ step;
        const NUMBER score = shuffled(best.score, other);
        const uint32_t id = platform::shuffle_word(static_cast<uint32_t>(best.id), other);
        const uint32_t is_nan = platform::shuffle_word(best.is_nan ? 1u : 0u, other);
        best = better(best, BestOf<NUMBER>{score, static_cast<int32_t>(id), is_nan != 0});
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
template <class NUMBER>
KCCL_DECODE void combine(EndingOf<NUMBER>* all, const EndingOf<NUMBER>& one) {
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
        EndingIn<S> all = {{0, -1, false}, false};
        KCCL_UNROLL
        for (uint32_t k = 0; k < kEach; ++k) {
            if ((wanted >> k & 1u) == 0) continue;
            const ControlWord control = control_word_of(float4s[k]);
            combine(&all, ending_in<S>(control));
        }
        all.best = best_of_warp(all.best);
        all.is_cancelled = platform::warp_any(all.is_cancelled);
        if (leads(warp())) {
            mem::store_plain(&consumer.shared().endings[consumer.warp_index()][column],
                             control_word_of(all));
        }
    });
}

// Publishes the block's control words of all columns, each by a thread of warp 0: its best token.
// What ends the request (cancelled, bad: numbers of requests, as the first thread knows them) is in
// that of the first column that chooses a token. All warps have met.
template <class S>
KCCL_DECODE void publish_endings(ConsumerWarp<S>& consumer, uint32_t first, uint32_t cancelled,
                                 uint32_t bad) {
    const uint32_t column = consumer.thread(), request = consumer.task().number;
    const bool is_bad = platform::shuffle_word(bad, 0) == request;
    const bool is_cancelled = platform::shuffle_word(cancelled, 0) == request;
    EndingIn<S> mine = {{0, -1, column == first && is_bad}, column == first && is_cancelled};
    if (column >= consumer.num_columns()) return;
    for (uint32_t each = 0; each < S::kWarps; ++each) {
        const ControlWord one = mem::load_plain(&consumer.shared().best[each][column]);
        mine.best = better(mine.best, ending_in<S>(one).best);
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
KCCL_DECODE void combine_column(const Shared<S>& shared, uint32_t column, EndingIn<S>* all) {
    KCCL_UNROLL
    for (uint32_t each = 0; each < S::kWarps; ++each) {
        const ControlWord control = mem::load_plain(&shared.endings[each][column]);
        combine(all, ending_in<S>(control));
    }
    // A kernel that leaves out a part of the work, to measure its cost (S::kAblated), has
    // meaningless logits. It goes on with id 0 and ignores NaN.
    if constexpr (S::kAblated != 0) all->best = {0, 0, false};
}

// Stores the warp's best token of a column in shared memory. Called by all threads of the warp.
template <class S, class NUMBER>
KCCL_DECODE void store_best(ConsumerWarp<S>& consumer, const BestOf<NUMBER>& of_thread,
                            uint32_t column) {
    const BestOf<NUMBER> best = best_of_warp(of_thread);
    if (leads(warp())) {
        mem::store_plain(&consumer.shared().best[consumer.warp_index()][column],
                         control_word_of(EndingIn<S>{{best.score, best.id, best.is_nan}, false}));
    }
}
// Does so for each column. The best token is the most likely one.
template <class S>
KCCL_DECODE void store_bests(ConsumerWarp<S>& consumer, const Bests<S, false>& best) {
    store_best<S, float>(consumer, best, 0);
}
template <class S>
KCCL_DECODE void store_bests(ConsumerWarp<S>& consumer, const Bests<S, true>& best) {
    KCCL_UNROLL
    for (uint32_t column = 0; column < S::kColumns; ++column) {
        if (!is_used(consumer, column)) break;
        store_best(consumer, best.of[column], column);
    }
}

}  // namespace kccl::decode
