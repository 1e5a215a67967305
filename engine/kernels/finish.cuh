// Ends a token step: all blocks of all ranks wait for each other, and learn the next token.
#pragma once

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
    const uint32_t first = Slots<S>::end(consumer.token_step(), 0, 0);
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
    consumer.template await<ConsumerWarp<S>::kReach, false>(
        slots, wanted, tag_of_end(consumer.token_step()), float4s, (1u << S::kWorldSize) - 1);
    mem::fence<mem::Order::kAcquire, ConsumerWarp<S>::kReach>();
    Ending all = {{0, -1, false}, false};
    KCCL_UNROLL
    for (uint32_t k = 0; k < kEach; ++k) {
        if ((wanted >> k & 1u) != 0) combine(&all, ending_of(control_word_of(float4s[k])));
    }
    all.best = best_of_warp(all.best);
    all.is_cancelled = platform::warp_any(all.is_cancelled);
    if (leads(warp())) {
        mem::store_plain(&consumer.shared().endings[consumer.warp_index()], control_word_of(all));
    }
}

// Decides whether the request ends, and leaves the verdict in shared memory for the block. In block
// 0, also reports the token to the host. all: the combination of all blocks' control words. Called
// by warp 0.
template <class S>
KCCL_DECODE void judge(ConsumerWarp<S>& consumer, uint32_t position, const Ending& all,
                       const Chosen& chosen) {
    const Task& task = consumer.task();
    Shared<S>& shared = consumer.shared();
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
    mem::store_plain(&shared.token, chosen.id);
    mem::store_plain(&shared.end, end);
    if constexpr (S::kSamples) {
        if (end == kKcclEngineGoesOn && makes_token(task, position)) {
            mark(consumer, chosen.id);
            count(consumer, chosen.id);
        }
    }
    if (consumer.block() == 0 && !consumer.failed() &&
        (makes_token(task, position) || end == kKcclEngineCancelled)) {
        auto* const tokens = reinterpret_cast<mem::Packet*>(task.tokens);
        const uint32_t id = static_cast<uint32_t>(chosen.id) & ((1u << kKcclDecodeEndAt) - 1);
        mem::store_packet<mem::Scope::kSystem>(
            tokens + (is_prompt ? 0 : num - 1),
            token_packet(task, id | end << kKcclDecodeEndAt, chosen.logprob));
    }
}

// Ends the token step that ran `position`: waits for all blocks of all ranks, chooses the next
// token if one is wanted, and sets *verdict. `best`: the most likely token among this thread's
// logits, if the head ran. Called by all consumer warps. Returns false if a wait failed.
template <class S>
KCCL_DECODE bool finish(ConsumerWarp<S>& consumer, uint32_t position, Best best, Verdict* verdict) {
    const Task& task = consumer.task();
    Shared<S>& shared = consumer.shared();
    auto* const mailbox = reinterpret_cast<Mailbox*>(task.mailbox);
    uint32_t cancelled = 0, bad = 0;
    consumer.stamp(kKcclDecodeBegan);
    if (consumer.block() == 0 && consumer.warp_index() == 0 && leads(warp())) {
        cancelled = mem::load<mem::Order::kRelaxed, mem::Scope::kSystem>(&mailbox->cancelled);
        bad = mem::load<mem::Order::kRelaxed, mem::Scope::kDevice>(
            bad_request_at<S>(task, consumer.comm().rank));
    }
    best = best_of_warp(best);
    if (leads(warp())) {
        mem::store_plain(&shared.best[consumer.warp_index()], control_word_of(Ending{best, false}));
    }
    mem::finish_stores();
    if (!consumer.meet()) return false;
    if (consumer.warp_index() == 0) {
        if constexpr (S::kSamples) {
            if (task.mask != 0 && consumer.block() == 0 && makes_token(task, position) &&
                await_mask(consumer, position + 1)) {
                cancelled = task.number;
            }
        }
        if (leads(warp())) {
            Ending mine = {{0, -1, bad == task.number}, cancelled == task.number};
            for (uint32_t each = 0; each < S::kWarps; ++each) {
                mine.best = better(mine.best, ending_of(mem::load_plain(&shared.best[each])).best);
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
    // All warps combine the same control words, so that all of them get the same result.
    Ending all = {{0, -1, false}, false};
    KCCL_UNROLL
    for (uint32_t each = 0; each < S::kWarps; ++each) {
        combine(&all, ending_of(mem::load_plain(&shared.endings[each])));
    }
    // A kernel that leaves out a part of the work, to measure its cost (S::kAblated), has
    // meaningless logits. It goes on with id 0 and ignores NaN.
    if constexpr (S::kAblated != 0) all.best = {0, 0, false};
    Chosen chosen = {all.best.id, platform::bit_cast<float>(uint32_t{kNoNumber})};
    if constexpr (S::kSamples) {
        const bool is_good = !all.is_cancelled && !all.best.is_nan && all.best.id >= 0;
        if (is_good && makes_token(task, position)) {
            Sampler<S> sampler(consumer, position + 1, all.best.score);
            if (!sampler.choose(&chosen)) return false;
        }
    }
    if (consumer.warp_index() == 0) judge(consumer, position, all, chosen);
    if (!consumer.meet()) return false;
    *verdict = {mem::load_plain(&shared.token), mem::load_plain(&shared.end)};
    consumer.end_op();
    consumer.next_token_step();
    return true;
}

}  // namespace kccl::decode
