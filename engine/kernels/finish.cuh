// Ends a token step: all blocks of all ranks wait for each other, and learn the next token.
//
// A token step may have drafts (drafts.cuh). Then each of its columns chooses a token, in their
// order, each from the logits behind all tokens before it, as without drafts. This ends behind the
// first token that differs from its draft. The next token step begins at that token. Its position's
// key and value, and those behind it, are written again before a query sees them
// (attend_columns.cuh).
#pragma once

#include "draw_at_end.cuh"
#include "endings.cuh"
#include "leaving.cuh"
#include "sample.cuh"

namespace kccl::decode {

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
    uint32_t end;  // KcclEngineEnd, or kLeaves
};

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
    uint32_t room = makes_drafts ? room_for_drafts<S>(task, position + 1) : 0, rest = 0;
    if (makes_drafts && task.draft_pace != 0) {
        Pace pace = mem::load_plain(&shared.pace);
        pace.learn(consumer.num_columns() - 1 - first, column - first + (is_draft ? 1u : 0));
        if (room != 0) rest = pace.begin_pause();
        room = rest == 0 ? least_of(room, pace.most) : 0;
        mem::store_plain(&shared.pace, pace);
    }
    mem::store_plain(&shared.room, room);
    mem::store_plain(&shared.rest, rest);
    mem::store_plain(&shared.num_columns, columns_of<S>(task, position + 1));
}

// Decides whether the request ends with the token that was chosen from a column's logits, and
// leaves the verdict in shared memory for the block. In block 0, also reports the token to the
// host. begin: the position of column 0. all: the combination of all blocks' control words. Called
// by one warp: warp 0, or with seats the one that has waited for the column.
template <class S, class NUMBER>
KCCL_DECODE void judge(ConsumerWarp<S>& consumer, uint32_t begin, const EndingOf<NUMBER>& all,
                       const Chosen& chosen, uint32_t column, uint32_t first) {
    const Task& task = task_of<S>(consumer.task(), column);
    const uint32_t position = position_of<S>(consumer.task(), begin, column);
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
        // The text is complete then, if a kernel with more columns goes on.
        if (task.draft_pace != 0 && end == kKcclEngineGoesOn && !is_prompt &&
            consumer.block() == 0) {
            mem::store_plain(reinterpret_cast<int32_t*>(task.ids) + position + 1, chosen.id);
        }
    } else if constexpr (S::kHasSeats) {
        mem::store_plain(&consumer.shared().tokens[column], chosen.id);
        // Any end but kKcclEngineGoesOn ends the round.
        mem::store_plain(&consumer.shared().verdicts[column],
                         all.ends_round ? uint32_t{kKcclEngineMaxTokens} : end);
    } else {
        is_draft =
            column + 1 < consumer.num_columns() && consumer.draft_of(column + 1) == chosen.id;
        leave_verdict(consumer, position, end, chosen.id, is_draft, column, first);
    }
    if constexpr (S::kSamples) {
        if (end == kKcclEngineGoesOn && makes_token(task, position)) {
            mark(consumer, task, chosen.id);
            count(consumer, task, chosen.id);
        }
    }
    if (consumer.block() == 0 && !consumer.failed() &&
        (makes_token(task, position) || end == kKcclEngineCancelled)) {
        auto* const tokens = reinterpret_cast<mem::Packet*>(task.tokens);
        uint32_t id = static_cast<uint32_t>(chosen.id) & ((1u << kKcclDecodeEndAt) - 1);
        if constexpr (S::kColumns > 1 && !S::kHasSeats) {
            id &= (1u << kKcclDecodeDraftsAt) - 1;
            id |= (consumer.num_columns() - 1 - first) << kKcclDecodeDraftsAt;
            id |= (is_draft ? 1u : 0) << kKcclDecodeIsDraftAt;
        }
        mem::store_packet<mem::Scope::kSystem>(
            tokens + (is_prompt ? 0 : num - 1),
            token_packet(task, id | end << kKcclDecodeEndAt, chosen.logprob));
    }
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
        EndingIn<S> all = {{0, -1, false}, false};
        combine_column(shared, column, &all);
        Chosen chosen = {all.best.id, platform::bit_cast<float>(uint32_t{kNoNumber})};
        if constexpr (S::kSamples) {
            const bool is_good = !all.is_cancelled && !all.best.is_nan && all.best.id >= 0;
            if (is_good && makes_token(task, position + column) && !is_drawn_at_end<S>(task)) {
                Sampler<S, AllWarps> sampler(consumer, position + column + 1,
                                             static_cast<float>(all.best.score), column);
                if (!sampler.choose(&chosen)) return false;
            }
        }
        if (consumer.warp_index() == 0) judge(consumer, position, all, chosen, column, first);
        if (!consumer.meet()) return false;
        *verdict = {mem::load_plain(&shared.tokens[column]),
                    mem::load_plain(&shared.verdicts[column])};
        if (verdict->end != kIsAccepted) break;
    }
    const bool goes_on = verdict->end == kKcclEngineGoesOn;
    const uint32_t room = goes_on ? mem::load_plain(&shared.room) : 0;
    if (room != 0 && !propose(consumer, Text<S>(consumer, position, first, column), room)) {
        return false;
    }
    consumer.end_columns(column + 1, mem::load_plain(&shared.num_columns));
    if (goes_on && lacks_drafts(consumer, room)) verdict->end = kLeaves;
    if (verdict->end == kKcclEngineGoesOn && consumer.warp_index() == 0 && leads(warp())) {
        mem::arrive(&shared.begun);
    }
    return true;
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
    bool is_drawn = false;
    if constexpr (kDrawsAtEnd<S>) {
        is_drawn = makes_token(task, position + first) && is_drawn_at_end<S>(task);
        if (is_drawn) {
            if (!consumer.meet()) return false;
            store_drawn<S>(consumer, best, position, first);
        }
    }
    if (!is_drawn) store_bests(consumer, best);
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
            EndingIn<S> mine = {{0, -1, bad == task.number}, cancelled == task.number};
            for (uint32_t each = 0; each < S::kWarps; ++each) {
                mine.best =
                    better(mine.best, ending_in<S>(mem::load_plain(&shared.best[each][0])).best);
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
        EndingIn<S> all = {{0, -1, false}, false};
        combine_column(shared, 0, &all);
        Chosen chosen = {all.best.id, platform::bit_cast<float>(uint32_t{kNoNumber})};
        if constexpr (S::kSamples) {
            const bool is_good = !all.is_cancelled && !all.best.is_nan && all.best.id >= 0;
            if (is_good && makes_token(task, position) && !is_drawn_at_end<S>(task)) {
                Sampler<S, AllWarps> sampler(consumer, position + 1,
                                             static_cast<float>(all.best.score), 0);
                if (!sampler.choose(&chosen)) return false;
            }
        }
        if (consumer.warp_index() == 0) judge(consumer, position, all, chosen, 0, 0);
        if (!consumer.meet()) return false;
        *verdict = {mem::load_plain(&shared.token), mem::load_plain(&shared.end)};
        if (verdict->end == kKcclEngineGoesOn && makes_token(task, position) &&
            finds_drafts(consumer, position, verdict->id)) {
            verdict->end = kLeaves;
        }
    }
    consumer.end_op();
    consumer.next_token_step();
    return true;
}

}  // namespace kccl::decode
