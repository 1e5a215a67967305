// Proposes drafts: guesses of the next tokens. A token step runs them in columns behind the last
// token. A draft counts as a token only if it equals the token that is chosen for its place
// (finish.cuh), so drafts change how long an answer takes, and never its tokens.
//
// If the host has predicted the text (Task.num_predicted), drafts are its ids at their places. Else
// drafts are the ids that followed the newest ids where these stood in the text before, as by
// repeat() in host/drafts.cpp. If they did not, a table of n-grams proposes some (host/ngrams.h).
// All blocks of all ranks have the same text and table, so they propose the same drafts and need no
// exchange for it.
//
// Block 0 of each rank adds the tokens to Task.ids, in which the other blocks read. A token is
// added before that block's control word of the next token step, which releases it. So a block
// reads there the tokens of earlier token steps only. It has those of this one itself.
#pragma once

#include "head.cuh"

namespace kccl::decode {

// The ids of the text so far: of the prompt and the answer.
template <class S>
class Text {
  public:
    // position: that of column 0. first, last: the columns whose tokens belong to the text.
    KCCL_DECODE Text(ConsumerWarp<S>& consumer, uint32_t position, uint32_t first, uint32_t last)
        : ids_(reinterpret_cast<const int32_t*>(consumer.task().ids)),
          tokens_(consumer.shared().tokens),
          old_(position + first + 1),
          num_(position + last + 2),
          position_(position) {}

    KCCL_DECODE uint32_t num() const { return num_; }
    KCCL_DECODE int32_t id(uint32_t i) const {
        return mem::load_plain(i < old_ ? ids_ + i : tokens_ + (i - position_ - 1));
    }

  private:
    const int32_t* const ids_;
    const int32_t* const tokens_;
    const uint32_t old_;  // how many ids are older than this token step
    const uint32_t num_;
    const uint32_t position_;
};

// The ids of a text that all lie in Task.ids, except for the newest one.
class StoredText {
  public:
    KCCL_DECODE StoredText(const Task& task, uint32_t num, int32_t newest)
        : ids_(reinterpret_cast<const int32_t*>(task.ids)), num_(num), newest_(newest) {}

    KCCL_DECODE uint32_t num() const { return num_; }
    KCCL_DECODE int32_t id(uint32_t i) const {
        return i + 1 < num_ ? mem::load_plain(ids_ + i) : newest_;
    }

  private:
    const int32_t* const ids_;
    const uint32_t num_;
    const int32_t newest_;
};

// A place in the text that drafts may be copied from, packed in a word. The upper bits have the
// length of the match: how many ids in front of the place equal those at the text's end. The lower
// bits have its position. So the largest place is the best. 0 is none.
constexpr uint32_t kFewestAlike = 3, kMostAlike = 16, kPlaceBits = 27;

// Returns the best place among this thread's share of the text.
template <class S, class Ids>
KCCL_DECODE uint32_t best_place(const ConsumerWarp<S>& consumer, const Ids& text) {
    const uint32_t own = consumer.warp_index() * platform::kWarpSize + consumer.thread();
    const int32_t last = text.id(text.num() - 1);
    uint32_t best = 0;
#pragma unroll 1
    for (uint32_t end = own + kFewestAlike; end < text.num(); end += Shape<S>::kConsumerThreads) {
        if (text.id(end - 1) != last) continue;
        const uint32_t longest = least_of(end, kMostAlike);
        uint32_t alike = 1;
        while (alike < longest && text.id(end - 1 - alike) == text.id(text.num() - 1 - alike)) {
            ++alike;
        }
        const uint32_t place = alike << kPlaceBits | end;
        if (alike >= kFewestAlike && place > best) best = place;
    }
    return best;
}
static_assert(kMostAlike < 1u << (32 - kPlaceBits), "a place has both");

// Proposes the ids that are predicted behind a text of num_ids ids. Called by one warp.
template <class S>
KCCL_DECODE void propose_predicted(ConsumerWarp<S>& consumer, uint32_t num_ids, uint32_t room) {
    const Task& task = consumer.task();
    if (num_ids >= task.num_predicted) return;
    const uint32_t num = least_of(room, task.num_predicted - num_ids), i = consumer.thread();
    const auto* const predicted = reinterpret_cast<const int32_t*>(task.ids) + S::kContext;
    if (i < num) {
        mem::store_plain(&consumer.shared().drafts[i + 1],
                         mem::load_plain(predicted + num_ids + i));
    }
    if (leads(warp())) mem::store_plain(&consumer.shared().num_columns, 1 + num);
}

// Proposes ids that follow on the text by the table of n-grams, as Ngrams in host/ngrams.h does.
// Called by one warp. Each of its first threads looks for a run of another length.
template <class S, class Ids>
KCCL_DECODE void propose_by_ngrams(ConsumerWarp<S>& consumer, const Ids& text, uint32_t room) {
    constexpr uint32_t kMost = kKcclEngineNgramIds;
    const KcclEngineNgrams& table = consumer.task().ngrams;
    const auto* const words = reinterpret_cast<const uint32_t*>(table.words);
    const uint32_t mask = (1u << table.id_bits) - 1, own = consumer.thread();
    // The newest ids, the last one first.
    uint32_t newest[kMost];
    KCCL_UNROLL
    for (uint32_t i = 0; i < kMost; ++i) {
        newest[i] = i < text.num() ? static_cast<uint32_t>(text.id(text.num() - 1 - i)) : 0;
    }
    uint32_t num = 0;
#pragma unroll 1
    for (; num < least_of(room, table.most); ++num) {
        uint64_t hashed = 0;
        KCCL_UNROLL
        for (uint32_t i = 0; i < kMost; ++i) {
            if (i > own) continue;
            hashed = (hashed ^ (uint64_t{newest[i]} + 1)) * 0x9E3779B97F4A7C15;
            hashed ^= hashed >> 32;
        }
        // The length of the run, and the id plus 1. So the largest is that of the longest run.
        uint32_t best = 0;
        if (own < kMost && own < text.num() + num) {
            const uint32_t word = mem::load_plain(words + (hashed >> (64 - table.slot_bits)));
            const bool is_there = ((word ^ static_cast<uint32_t>(hashed)) & ~mask) == 0;
            if (is_there && (word & mask) != 0) {
                best = (own + 1) << kKcclEngineIdBits | (word & mask);
            }
        }
        best = most_of_warp(best);
        if (best == 0) break;
        const uint32_t id = (best & ((1u << kKcclEngineIdBits) - 1)) - 1;
        KCCL_UNROLL
        for (uint32_t i = kMost - 1; i > 0; --i) newest[i] = newest[i - 1];
        newest[0] = id;
        if (leads(warp())) {
            mem::store_plain(&consumer.shared().drafts[num + 1], static_cast<int32_t>(id));
        }
    }
    if (leads(warp())) mem::store_plain(&consumer.shared().num_columns, 1 + num);
}

// Proposes at most `room` drafts for the next token step, and writes them and its number of columns
// into shared memory. text: a Text or a StoredText. Called by all consumer warps. Returns false if
// a wait failed.
template <class S, class Ids>
KCCL_DECODE bool propose(ConsumerWarp<S>& consumer, const Ids& text, uint32_t room) {
    static_assert(S::kContext < 1u << kPlaceBits, "a place has room");
    Shared<S>& shared = consumer.shared();
    if (consumer.task().num_predicted != 0) {
        if (consumer.warp_index() == 0) propose_predicted(consumer, text.num(), room);
        return consumer.meet();
    }
    uint32_t best = most_of_warp(best_place(consumer, text));
    if (leads(warp())) mem::store_plain(&shared.places[consumer.warp_index()], best);
    if (!consumer.meet()) return false;
    if (consumer.warp_index() == 0) {
        KCCL_UNROLL
        for (uint32_t each = 0; each < S::kWarps; ++each) {
            const uint32_t other = mem::load_plain(&shared.places[each]);
            best = other > best ? other : best;
        }
        if (best != 0) {
            const uint32_t from = best & ((1u << kPlaceBits) - 1), i = consumer.thread();
            // Where the text ends before the drafts do, they go on with the first ones.
            if (i < room) {
                const uint32_t at = from + i % (text.num() - from);
                mem::store_plain(&shared.drafts[i + 1], text.id(at));
            }
            if (leads(warp())) mem::store_plain(&shared.num_columns, 1 + room);
        } else if (consumer.task().ngrams.words != 0) {
            propose_by_ngrams(consumer, text, room);
        }
    }
    return consumer.meet();
}

// Returns how many drafts the text has room for behind the token whose place is `position`. The
// request and the context must have room for one more token behind each draft.
template <class S>
KCCL_DECODE uint32_t room_in_text(const Task& task, uint32_t position) {
    const uint32_t num_ids = position + 1;
    const uint32_t of_answer = task.max_tokens - (num_ids - task.num_ids);
    return least_of(of_answer, S::kContext - num_ids) - 1;
}

// Returns how many drafts may follow on that token in this kernel.
template <class S>
KCCL_DECODE uint32_t room_for_drafts(const Task& task, uint32_t position) {
    return least_of(room_in_text<S>(task, position), least_of(task.most_drafts, S::kColumns - 1));
}

}  // namespace kccl::decode
