// A request with a pace of drafts (Task.draft_pace) changes between two kernels: that with several
// columns runs token steps that have drafts, and that with one column those without. A token step
// of the latter takes less time, because a column costs time even where nothing uses it.
//
// A kernel leaves the request to the other one by ending behind a token step. All blocks of all
// ranks know the same text and pace, so they decide alike. The host then launches the other kernel,
// as a request that goes on from its cached keys: its `start` is the position of the last token.
// The text lies in Task.ids, and the mailbox has what the other kernel must know. The exchange
// buffer, the keys and the counters are those that a request finds behind the one before.
//
// So a request has the same token steps, with the same drafts, as if one kernel ran it all; but for
// drafts to begin, a longer run of ids must match (kFewestToLeave).
#pragma once

#include "drafts.cuh"

namespace kccl::decode {

// A Verdict's end: the kernel ends, and the request goes on in the other one.
constexpr uint32_t kLeaves = 1u << 30;

// How many ids must match before the kernel with one column leaves a request. A change of kernels
// costs a small model up to half a token, and drafts of longer matches are right more often.
constexpr uint32_t kFewestToLeave = 5;
static_assert(kFewestToLeave >= kFewestAlike && kFewestToLeave <= kMostAlike,
              "a match may be longer");

// Tells whether the kernel with several columns leaves the request, because the next token step has
// no drafts. With a table of n-grams most token steps have some, so only a pause is a reason. room:
// how many drafts the next token step has room for. All warps have met since drafts were proposed.
template <class S>
KCCL_DECODE bool lacks_drafts(ConsumerWarp<S>& consumer, uint32_t room) {
    const Task& task = consumer.task();
    if (task.draft_pace == 0) return false;
    if (mem::load_plain(&consumer.shared().rest) != 0) return true;
    // The table proposes nothing where the host has predicted the text.
    const bool uses_table = task.ngrams.words != 0 && task.num_predicted == 0;
    return room != 0 && !uses_table && mem::load_plain(&consumer.shared().num_columns) == 1;
}

// Tells whether the kernel with one column leaves the request, because the next token step has
// drafts. position: that of this token step. newest: the token behind it. Called by all consumer
// warps.
template <class S>
KCCL_DECODE bool finds_drafts(ConsumerWarp<S>& consumer, uint32_t position, int32_t newest) {
    const Task& task = consumer.task();
    if (task.draft_pace == 0 || position + 1 - task.start < task.rest) return false;
    if (room_in_text<S>(task, position + 1) == 0) return false;
    const uint32_t num_ids = position + 2;
    if (task.num_predicted != 0) return num_ids < task.num_predicted;
    if (task.ngrams.words != 0) return true;
    const uint32_t best = best_place(consumer, StoredText(task, num_ids, newest));
    return consumer.meet_any(best >= kFewestToLeave << kPlaceBits);
}

// Begins a request that the kernel with one column has left: proposes the drafts of the first token
// step. newest: the last token. Called by all consumer warps. Returns false if a wait failed.
template <class S>
KCCL_DECODE bool begin_with_drafts(ConsumerWarp<S>& consumer, int32_t newest) {
    const Task& task = consumer.task();
    Shared<S>& shared = consumer.shared();
    if (leads(block())) mem::store_plain(&shared.num_columns, 1u);
    if (!consumer.meet()) return false;
    const uint32_t room = least_of(room_for_drafts<S>(task, task.start), pace_of(task).most);
    if (room != 0 && !propose(consumer, StoredText(task, task.start + 1, newest), room)) {
        return false;
    }
    consumer.end_columns(0, mem::load_plain(&shared.num_columns));
    if (leads(block())) mem::arrive(&shared.begun);
    return true;
}

// Tells the host that this kernel leaves the request. position: where the other one begins. Called
// by one thread of block 0, when all warps have met behind the last token step.
template <class S>
KCCL_DECODE void leave(const Task& task, const Shared<S>& shared, uint32_t position) {
    auto* const mailbox = reinterpret_cast<Mailbox*>(task.mailbox);
    uint32_t rest = 0, pace = task.pace;
    if constexpr (S::kColumns > 1) {
        rest = mem::load_plain(&shared.rest);
        pace = word_of(mem::load_plain(&shared.pace));
    }
    const auto tell = [](uint32_t* to, uint32_t value) {
        mem::store<mem::Order::kRelaxed, mem::Scope::kSystem>(to, value);
    };
    tell(&mailbox->start, position);
    tell(&mailbox->rest, rest);
    tell(&mailbox->pace, pace);
    tell(&mailbox->left, task.number);
}

}  // namespace kccl::decode
