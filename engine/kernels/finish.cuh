// Ends a token step: all blocks of all ranks wait for each other, and learn the next token.
//
// A token step may have drafts (drafts.cuh). Then each of its columns chooses a token, in their
// order, each from the logits behind all tokens before it, as without drafts. This ends behind the
// first token that differs from its draft. The next token step begins at that token. Its position's
// key and value, and those behind it, are written again before a query sees them
// (attend_columns.cuh).
#pragma once

#include "drafts.cuh"
#include "sample.cuh"

namespace kccl::decode {

// What a block tells all others at the end of a token step, in a control word: its most likely
// token, whether a value was NaN, and whether its host has cancelled the request. Only block 0 of a
// rank checks whether its host has cancelled, and whether a key or value was NaN (bad_request_at).
struct Ending {
    Best best;
    bool is_cancelled;
};

KCCL_DECODE ControlWord control_word_of(const Ending& ending) {
    return {{platform::bit_cast<uint32_t>(ending.best.score),
             static_cast<uint32_t>(ending.best.id + 1), 0},
            (ending.best.is_nan ? 1u : 0) | (ending.is_cancelled ? 2u : 0)};
}

KCCL_DECODE Ending ending_of(const ControlWord& control) {
    return {{platform::bit_cast<float>(control.word[0]), static_cast<int32_t>(control.word[1]) - 1,
             (control.small & 1u) != 0},
            (control.small & 2u) != 0};
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

KCCL_DECODE bool is_stop_id(const Task& task, int32_t id) {
    const auto* ids = reinterpret_cast<const int32_t*>(task.stop_ids);
    for (uint32_t i = 0; i < task.num_stop_ids; ++i) {
        if (mem::load_plain(ids + i) == id) return true;
    }
    return false;
}

// Tells whether the logits after `position` are used to choose a token.
KCCL_DECODE bool makes_token(const Task& task, uint32_t position) {
    return position + 1 >= task.num_ids && task.max_tokens != 0;
}

// The result of a token step: the token for the next position, whether the request ends, and why.
struct Verdict {
    int32_t id;
    uint32_t end;  // KcclEngineEnd
};

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
            if ((wanted >> k & 1u) != 0) combine(&all, ending_of(control_word_of(float4s[k])));
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
    const uint32_t request = consumer.task().number, column = consumer.thread();
    const bool is_bad = platform::shuffle_word(bad, 0) == request;
    const bool is_cancelled = platform::shuffle_word(cancelled, 0) == request;
    if (column >= consumer.num_columns()) return;
    Ending mine = {{0, -1, column == first && is_bad}, column == first && is_cancelled};
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

// Stores a column's token and its verdict in shared memory. A token step keeps no token behind one
// that is not accepted. So with that one it also stores how many columns the next token step has
// without drafts, and how many drafts that one has room for. All warps read this after their next
// meeting.
//
// position: the column's. end: whether the request ends with the token. id: the token. is_draft:
// the token equals the next column's draft. first: the first column that chooses a token. Called by
// the block's first thread.
template <class S>
KCCL_DECODE void leave_verdict(ConsumerWarp<S>& consumer, uint32_t position, uint32_t end,
                               int32_t id, bool is_draft, uint32_t column, uint32_t first) {
    const Task& task = consumer.task();
    Shared<S>& shared = consumer.shared();
    const bool is_accepted = is_draft && end == kKcclEngineGoesOn;
    mem::store_plain(&shared.tokens[column], id);
    mem::store_plain(&shared.verdicts[column], is_accepted ? kIsAccepted : end);
    const bool makes_drafts =
        task.most_drafts != 0 && end == kKcclEngineGoesOn && makes_token(task, position);
    if (makes_drafts && consumer.block() == 0) {
        mem::store_plain(reinterpret_cast<int32_t*>(task.ids) + position + 1, id);
    }
    if (is_accepted) return;
    uint32_t room = makes_drafts ? room_for_drafts<S>(task, position + 1) : 0;
    if (makes_drafts && task.draft_pace != 0) {
        Pace pace = mem::load_plain(&shared.pace);
        pace.learn(consumer.num_columns() - 1 - first, column - first + (is_draft ? 1u : 0));
        if (room != 0) room = least_of(room, pace.next());
        mem::store_plain(&shared.pace, pace);
    }
    mem::store_plain(&shared.room, room);
    mem::store_plain(&shared.num_columns, columns_of<S>(task, position + 1));
}

// Decides whether the request ends with the token that was chosen from a column's logits, and
// leaves the verdict in shared memory for the block. In block 0, also reports the token to the
// host. begin: the position of column 0. all: the combination of all blocks' control words. Called
// by warp 0.
template <class S>
KCCL_DECODE void judge(ConsumerWarp<S>& consumer, uint32_t begin, const Ending& all,
                       const Chosen& chosen, uint32_t column, uint32_t first) {
    const Task& task = consumer.task();
    const uint32_t position = begin + column;
    const bool is_prompt = position + 1 < task.num_ids;
    const uint32_t num = position + 2 - task.num_ids;
    const uint32_t end = all.is_cancelled                   ? kKcclEngineCancelled
                         : is_prompt                        ? kKcclEngineGoesOn
                         : !makes_token(task, position)     ? kKcclEngineMaxTokens
                         : all.best.is_nan || chosen.id < 0 ? kKcclEngineBadLogits
                         : is_stop_id(task, chosen.id)      ? kKcclEngineStopId
                         : num == task.max_tokens           ? kKcclEngineMaxTokens
                         : position + 2 == S::kContext      ? kKcclEngineContextFull
                                                            : kKcclEngineGoesOn;
    if (!leads(warp())) return;
    bool is_draft = false;
    if constexpr (S::kColumns == 1) {
        mem::store_plain(&consumer.shared().token, chosen.id);
        mem::store_plain(&consumer.shared().end, end);
    } else {
        is_draft =
            column + 1 < consumer.num_columns() && consumer.draft_of(column + 1) == chosen.id;
        leave_verdict(consumer, position, end, chosen.id, is_draft, column, first);
    }
    if constexpr (S::kSamples) {
        if (end == kKcclEngineGoesOn && makes_token(task, position)) {
            mark(consumer, chosen.id);
            count(consumer, chosen.id);
        }
    }
    if (consumer.block() == 0 && !consumer.failed() &&
        (makes_token(task, position) || end == kKcclEngineCancelled)) {
        auto* const tokens = reinterpret_cast<mem::Packet*>(task.tokens);
        uint32_t id = static_cast<uint32_t>(chosen.id) & ((1u << kKcclDecodeEndAt) - 1);
        if constexpr (S::kColumns > 1) {
            id &= (1u << kKcclDecodeDraftsAt) - 1;
            id |= (consumer.num_columns() - 1 - first) << kKcclDecodeDraftsAt;
            id |= (is_draft ? 1u : 0) << kKcclDecodeIsDraftAt;
        }
        mem::store_packet<mem::Scope::kSystem>(
            tokens + (is_prompt ? 0 : num - 1),
            token_packet(task, id | end << kKcclDecodeEndAt, chosen.logprob));
    }
}

// Combines all blocks' control words of a column. All warps combine the same ones, so that all of
// them get the same result.
template <class S>
KCCL_DECODE void combine_column(const Shared<S>& shared, uint32_t column, Ending* all) {
    KCCL_UNROLL
    for (uint32_t each = 0; each < S::kWarps; ++each) {
        combine(all, ending_of(mem::load_plain(&shared.endings[each][column])));
    }
    // A kernel that leaves out a part of the work, to measure its cost (S::kAblated), has
    // meaningless logits. It goes on with id 0 and ignores NaN.
    if constexpr (S::kAblated != 0) all->best = {0, 0, false};
}

// Chooses tokens from the columns of a token step, from column `first` on, and proposes drafts for
// the next one. position: that of column 0. Called by all consumer warps. Sets *verdict. Returns
// false if a wait failed.
template <class S>
KCCL_DECODE bool choose_in_columns(ConsumerWarp<S>& consumer, uint32_t position, uint32_t first,
                                   Verdict* verdict) {
    const Task& task = consumer.task();
    Shared<S>& shared = consumer.shared();
    uint32_t column = first;
#pragma unroll 1
    for (;; ++column) {
        Ending all = {{0, -1, false}, false};
        combine_column(shared, column, &all);
        Chosen chosen = {all.best.id, platform::bit_cast<float>(uint32_t{kNoNumber})};
        if constexpr (S::kSamples) {
            const bool is_good = !all.is_cancelled && !all.best.is_nan && all.best.id >= 0;
            if (is_good && makes_token(task, position + column)) {
                Sampler<S> sampler(consumer, position + column + 1, all.best.score, column);
                if (!sampler.choose(&chosen)) return false;
            }
        }
        if (consumer.warp_index() == 0) judge(consumer, position, all, chosen, column, first);
        if (!consumer.meet()) return false;
        *verdict = {mem::load_plain(&shared.tokens[column]),
                    mem::load_plain(&shared.verdicts[column])};
        if (verdict->end != kIsAccepted) break;
    }
    const uint32_t room = verdict->end == kKcclEngineGoesOn ? mem::load_plain(&shared.room) : 0;
    if (room != 0 && !propose(consumer, Text<S>(consumer, position, first, column), room)) {
        return false;
    }
    consumer.end_columns(column + 1, mem::load_plain(&shared.num_columns));
    if (verdict->end == kKcclEngineGoesOn && consumer.warp_index() == 0 && leads(warp())) {
        mem::arrive(&shared.begun);
    }
    return true;
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

// Ends the token step that ran the positions from `position` on: waits for all blocks of all ranks,
// chooses the next tokens if any are wanted, and sets *verdict. best: the most likely tokens among
// this thread's logits, if the head ran. Called by all consumer warps. Returns false if
// a wait failed.
template <class S>
KCCL_DECODE bool finish(ConsumerWarp<S>& consumer, uint32_t position, const Bests<S>& best,
                        Verdict* verdict) {
    const Task& task = consumer.task();
    Shared<S>& shared = consumer.shared();
    auto* const mailbox = reinterpret_cast<Mailbox*>(task.mailbox);
    const uint32_t first = first_choosing(consumer, position);
    uint32_t cancelled = 0, bad = 0;
    consumer.stamp(kKcclDecodeBegan);
    if (consumer.block() == 0 && consumer.warp_index() == 0 && leads(warp())) {
        cancelled = mem::load<mem::Order::kRelaxed, mem::Scope::kSystem>(&mailbox->cancelled);
        bad = mem::load<mem::Order::kRelaxed, mem::Scope::kDevice>(
            bad_request_at<S>(task, consumer.comm().rank));
    }
    store_bests(consumer, best);
    mem::finish_stores();
    if (!consumer.meet()) return false;
    if (consumer.warp_index() == 0) {
        if constexpr (S::kSamples) {
            if (task.mask != 0 && consumer.block() == 0 && makes_token(task, position + first) &&
                await_mask(consumer, position + first + 1)) {
                cancelled = task.number;
            }
        }
        if constexpr (S::kColumns > 1) {
            publish_endings(consumer, first, cancelled, bad);
        } else if (leads(warp())) {
            Ending mine = {{0, -1, bad == task.number}, cancelled == task.number};
            for (uint32_t each = 0; each < S::kWarps; ++each) {
                mine.best =
                    better(mine.best, ending_of(mem::load_plain(&shared.best[each][0])).best);
            }
            // The release makes all that the block has written in this token step visible to the
            // blocks that receive its control word. exchange_buffer.cuh says why that is needed.
            mem::fence<mem::Order::kRelease, ConsumerWarp<S>::kReach>();
            consumer.publish_to_all(
                Slots<S>::end(consumer.token_step(), consumer.comm().rank, consumer.block()),
                float4_of(control_word_of(mine)), tag_of_end(consumer.token_step()));
        }
        consumer.stamp(kKcclDecodeArrived);
    }
    collect_endings(consumer);
    consumer.stamp(kKcclDecodeMultiplied);
    if (!consumer.meet()) return false;
    if constexpr (S::kColumns > 1) {
        if (!choose_in_columns(consumer, position, first, verdict)) return false;
    } else {
        Ending all = {{0, -1, false}, false};
        combine_column(shared, 0, &all);
        Chosen chosen = {all.best.id, platform::bit_cast<float>(uint32_t{kNoNumber})};
        if constexpr (S::kSamples) {
            const bool is_good = !all.is_cancelled && !all.best.is_nan && all.best.id >= 0;
            if (is_good && makes_token(task, position)) {
                Sampler<S> sampler(consumer, position + 1, all.best.score, 0);
                if (!sampler.choose(&chosen)) return false;
            }
        }
        if (consumer.warp_index() == 0) judge(consumer, position, all, chosen, 0, 0);
        if (!consumer.meet()) return false;
        *verdict = {mem::load_plain(&shared.token), mem::load_plain(&shared.end)};
    }
    consumer.end_op();
    consumer.next_token_step();
    return true;
}

}  // namespace kccl::decode
