// The end of a round: all blocks of all ranks wait for each other, and learn which token is next.
#pragma once

#include "sample.cuh"

namespace kccl::decode {

// A block's word for the others: its most likely token, and whether its host has cancelled the
// request. Only block 0 of a rank looks at that, and whether a position before, whose logits nobody
// asked for, was not a number.
struct Ending {
    Best best;
    bool is_cancelled;
};

KCCL_DEVICE Note note_of(const Ending& ending) {
    return {{platform::bit_cast<uint32_t>(ending.best.score),
             static_cast<uint32_t>(ending.best.id + 1), 0},
            (ending.best.is_nan ? 1u : 0) | (ending.is_cancelled ? 2u : 0)};
}

KCCL_DEVICE Ending ending_of(const Note& note) {
    return {{platform::bit_cast<float>(note.word[0]), static_cast<int32_t>(note.word[1]) - 1,
             (note.small & 1u) != 0},
            (note.small & 2u) != 0};
}

KCCL_DEVICE Best best_of_warp(Best best) {
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

KCCL_DEVICE bool is_stop_id(const Task& task, int32_t id) {
    const auto* ids = reinterpret_cast<const int32_t*>(task.stop_ids);
    for (uint32_t i = 0; i < task.num_stop_ids; ++i) {
        if (mem::load_plain(ids + i) == id) return true;
    }
    return false;
}

// Whether the logits after `position` give a token.
KCCL_DEVICE bool makes_token(const Task& task, uint32_t position) {
    return position + 1 >= task.num_ids && task.max_tokens != 0;
}

// What a round gives: the token for the next position, and whether and why the request ends.
struct Verdict {
    int32_t id;
    uint32_t end;  // End
};

// Waits for the endings of all blocks. Warp 0.
template <class S>
KCCL_DEVICE Ending collect_endings(Worker<S>& worker) {
    Quad quads[Worker<S>::kOfAll];
    const uint32_t wanted =
        worker.await_all(Places<S>::end(worker.round(), 0, 0), tag_of_end(worker.round()), quads);
    Ending all = {{0, -1, false}, false};
    KCCL_UNROLL
    for (uint32_t k = 0; k < Worker<S>::kOfAll; ++k) {
        if ((wanted >> k & 1u) == 0) continue;
        const Ending one = ending_of(note_of(quads[k]));
        all.best = better(all.best, one.best);
        all.is_cancelled |= one.is_cancelled;
    }
    all.best = best_of_warp(all.best);
    all.is_cancelled = platform::warp_any(all.is_cancelled);
    return all;
}

// Leaves the verdict for the block, and tells the host. Warp 0.
template <class S>
KCCL_DEVICE void judge(Worker<S>& worker, uint32_t position, const Ending& all,
                       const Chosen& chosen) {
    const Task& task = worker.task();
    Shared<S>& shared = worker.shared();
    const bool is_prompt = position + 1 < task.num_ids;
    const uint32_t count = position + 2 - task.num_ids;
    const uint32_t end = all.is_cancelled                     ? kKcclEngineCancelled
                         : is_prompt                          ? kKcclEngineGoesOn
                         : !makes_token(task, position)       ? kKcclEngineMaxTokens
                         : all.best.is_nan || all.best.id < 0 ? kKcclEngineBadLogits
                         : is_stop_id(task, chosen.id)        ? kKcclEngineStopId
                         : count == task.max_tokens           ? kKcclEngineMaxTokens
                         : position + 2 == S::kContext        ? kKcclEngineContextFull
                                                              : kKcclEngineGoesOn;
    if (!leads(warp())) return;
    mem::store_plain(&shared.token, chosen.id);
    mem::store_plain(&shared.end, end);
    if constexpr (S::kSamples) {
        if (end == kKcclEngineGoesOn && makes_token(task, position)) mark(worker, chosen.id);
    }
    if (worker.block() == 0 && !worker.failed() &&
        (makes_token(task, position) || end == kKcclEngineCancelled)) {
        auto* const tokens = reinterpret_cast<mem::Packet*>(task.tokens);
        const uint32_t id = static_cast<uint32_t>(chosen.id) & ((1u << kKcclDecodeEndAt) - 1);
        const auto logprob = platform::bit_cast<uint32_t>(chosen.logprob);
        const uint64_t number = uint64_t{task.number} << 32;
        mem::store_packet<mem::Scope::kSystem>(
            tokens + (is_prompt ? 0 : count - 1),
            mem::Packet{{(id | end << kKcclDecodeEndAt) | number, logprob | number}});
    }
}

// Ends the round that ran `position`; `best`: of this thread's logits, if the head ran. Called by
// all warps that multiply. False: a wait failed.
template <class S>
KCCL_DEVICE bool finish(Worker<S>& worker, uint32_t position, Best best, Verdict* verdict) {
    const Task& task = worker.task();
    Shared<S>& shared = worker.shared();
    auto* const mailbox = reinterpret_cast<Mailbox*>(task.mailbox);
    uint32_t cancelled = 0, bad = 0;
    worker.stamp(kKcclDecodeBegan);
    if (worker.block() == 0 && worker.warp_index() == 0 && leads(warp())) {
        cancelled = mem::load<mem::Order::kRelaxed, mem::Scope::kSystem>(&mailbox->cancelled);
        bad = mem::load<mem::Order::kRelaxed, mem::Scope::kDevice>(
            bad_request_at<S>(task, worker.comm().rank));
    }
    best = best_of_warp(best);
    if (leads(warp())) {
        mem::store_plain(&shared.best[worker.warp_index()], note_of(Ending{best, false}));
    }
    mem::finish_stores();
    if (!worker.meet()) return false;
    Ending all = {{0, -1, false}, false};
    if (worker.warp_index() == 0) {
        if (leads(warp())) {
            Ending mine = {{0, -1, bad == task.number}, cancelled == task.number};
            for (uint32_t each = 0; each < S::kWarps; ++each) {
                mine.best = better(mine.best, ending_of(mem::load_plain(&shared.best[each])).best);
            }
            // See board.cuh: releases what the block has written in this round.
            mem::fence<mem::Order::kRelease, Worker<S>::kReach>();
            worker.publish_to_all(
                Places<S>::end(worker.round(), worker.comm().rank, worker.block()),
                quad_of(note_of(mine)), tag_of_end(worker.round()));
        }
        worker.stamp(kKcclDecodeArrived);
        all = collect_endings(worker);
        mem::fence<mem::Order::kAcquire, Worker<S>::kReach>();
        worker.stamp(kKcclDecodeMultiplied);
        if (S::kSamples && leads(warp())) mem::store_plain(&shared.ending, note_of(all));
    }
    // What an ablated kernel computes means nothing.
    if constexpr (S::kAblated != 0) all.best = {0, 0, false};
    Chosen chosen = {all.best.id, platform::bit_cast<float>(uint32_t{kNoNumber})};
    if constexpr (S::kSamples) {
        if (!worker.meet()) return false;
        all = ending_of(mem::load_plain(&shared.ending));
        const bool is_good = !all.is_cancelled && !all.best.is_nan && all.best.id >= 0;
        if (is_good && makes_token(task, position)) {
            Sampler<S> sampler(worker, position + 1, all.best.score);
            if (!sampler.choose(&chosen)) return false;
        }
    }
    if (worker.warp_index() == 0) judge(worker, position, all, chosen);
    if (!worker.meet()) return false;
    *verdict = {mem::load_plain(&shared.token), mem::load_plain(&shared.end)};
    worker.end_op();
    worker.next_round();
    return true;
}

}  // namespace kccl::decode
