// What a block keeps in shared memory for drafts: guesses of the next tokens (drafts.cuh).
#pragma once

#include "columns.cuh"

namespace kccl::decode {

// Decides how many drafts a token step has, if the request leaves that to the kernel. The twin of
// Pace in host/drafts.h, which explains the rule.
struct Pace {
    static constexpr uint32_t kTrial = 8, kNextTrial = 4, kFirstPause = 16, kLongestPause = 256;

    uint32_t pace = 0;  // KcclEngineDraftPace
    uint32_t most = 0;
    uint32_t trial = kTrial;
    uint32_t drafts = 0, accepted = 0;
    uint32_t pause = 0, next_pause = kFirstPause;

    KCCL_DECODE uint32_t part(uint32_t at) const { return pace >> at & 255; }
    // Returns how many token steps without drafts follow now, in the kernel with one column.
    KCCL_DECODE uint32_t begin_pause() {
        const uint32_t begun = pause;
        pause = 0;
        return begun;
    }
    KCCL_DECODE void learn(uint32_t num_drafts, uint32_t num_accepted) {
        drafts += num_drafts;
        accepted += num_accepted;
        if (drafts < trial) return;
        const uint32_t share = kKcclEngineWhole * accepted;
        most = share >= part(kKcclEngineSevenAt) * drafts   ? 7
               : share >= part(kKcclEngineThreeAt) * drafts ? 3
                                                            : part(kKcclEngineFirstAt);
        if (share >= part(kKcclEngineLeastAt) * drafts) {
            trial = kTrial;
            next_pause = kFirstPause;
        } else {
            trial = kNextTrial;
            pause = next_pause;
            next_pause = least_of(2 * next_pause, kLongestPause);
        }
        drafts = accepted = 0;
    }
};

// Packs a Pace outside of a pause into a word (Task.pace), which is never 0.
KCCL_DECODE uint32_t word_of(const Pace& pace) {
    return 1u << 31 | pace.next_pause << 16 | pace.accepted << 12 | pace.drafts << 8 |
           pace.trial << 4 | pace.most;
}

// Returns the Pace of a request that begins, or that another kernel has left to this one.
KCCL_DECODE Pace pace_of(const Task& task) {
    Pace pace = {};
    pace.pace = task.draft_pace;
    pace.most = pace.part(kKcclEngineFirstAt);
    if (task.pace != 0) {
        pace.most = task.pace & 15;
        pace.trial = task.pace >> 4 & 15;
        pace.drafts = task.pace >> 8 & 15;
        pace.accepted = task.pace >> 12 & 15;
        pace.next_pause = task.pace >> 16 & 1023;
    }
    return pace;
}

// In a kernel with one column this is empty.
template <class S, bool HAS_COLUMNS = (S::kColumns > 1)>
struct SharedDrafts {};
template <class S>
struct SharedDrafts<S, true> {
    // [column]: the ids that the token step runs, if they are drafts: from column 1 on.
    int32_t drafts[S::kColumns];
    // [column]: the token that was chosen from the column's logits, and kIsAccepted or the
    // KcclEngineEnd.
    int32_t tokens[S::kColumns];
    uint32_t verdicts[S::kColumns];
    uint32_t room;         // how many drafts the next token step may have
    uint32_t num_columns;  // of the next token step
    uint32_t rest;         // how many token steps have no drafts now, if drafts pause
    // [column], with seats: what ends its request or the round, as bits of ControlWord::small.
    uint32_t wishes[S::kHasSeats ? S::kColumns : 1];
    uint32_t places[S::kWarps];  // each warp's best place to copy drafts from
    Pace pace;                   // only the first thread uses it
    // Ends a phase when num_columns is written. Only the collecting warp waits for it.
    alignas(16) mem::CopyBarrier begun;
};

// A verdict: the column's draft equals the token before it, so the next column counts.
constexpr uint32_t kIsAccepted = 1u << 31;

}  // namespace kccl::decode
