// A batch: requests that run at the same time, so that one pass reads the weights for all of them.
//
// The columns of a pass are those of several texts: of each text that is being written the last
// token, with drafts behind it, and a part of each prompt that is new. The leading block (block 0
// of rank 0) alone knows the requests. Before each pass it lets requests join and leave, and tells
// all other blocks its columns. Then it chooses tokens from its logits. A column's bits do not
// depend on the other columns, nor the choice of a token on other requests. So a request has the
// tokens that it would have alone.
//
// A request with a grammar skips passes until Python has posted its mask. If it had drafts, the
// logits of all its columns are kept, and one mask after the other is taken.
#pragma once

#include <chrono>
#include <condition_variable>
#include <mutex>

#include "answer.h"
#include "pass.h"

namespace kccl::engine {

// A request of a batch. The batch's mutex guards what other threads see: up to `changed`.
struct Member {
    enum class State {
        kFree,
        kJoined,  // its request waits for the next pass
        kRuns,
        kEnded  // its last tokens may not have been taken yet
    };

    Member(const KcclEngineModel& model)
        : tokens(zeros<KcclEngineToken>(model.context)), answer(model) {}

    bool is_complete() const { return tokens && answer.is_complete(); }
    bool is_in_prompt() const { return num_cached < answer.request.num_ids; }

    State state = State::kFree;
    bool is_cancelled = false;
    const Array<KcclEngineToken> tokens;
    uint32_t num_tokens = 0, num_taken = 0;
    std::condition_variable changed;

    // Only the leading block uses these, while the member runs.
    Answer answer;
    // If it waits for a mask: those of its columns, one after the other. Null before a request with
    // a grammar has joined.
    Floats logits;
    bool is_done = false;  // whether its last token was chosen
    bool waits_for_mask = false;
    uint32_t column = 0;       // if it waits for a mask: from which column the next token is chosen
    uint32_t num_cached = 0;   // how many ids of the prompt the cache has
    uint32_t length = 0;       // how many ids the text has
    uint32_t pass_number = 0;  // how many of its passes had logits for it
    uint32_t num_columns = 0;  // how many columns of this pass are its own
    uint32_t first_logits = 0;  // the number of its first column among those with logits
    Decision asked = {};        // has the drafts of this pass
};

class Batch {
  public:
    explicit Batch(const KcclEngineModel& model);
    bool is_complete() const;

    // Begins without members.
    void begin();
    // Ends the batch. No block works on it any more.
    void end();

    // These have the meaning of the functions of the C interface with their names.
    int join(const KcclEngineRequest& request);
    int next(uint32_t number, KcclEngineToken* token, uint64_t limit_ns);
    void post_mask(uint32_t number, uint32_t position, const uint32_t* words);
    void cancel(uint32_t number);
    int leave(uint32_t number, uint64_t limit_ns);

    // Makes plan() look at once whether the batch shall end.
    void wake();

    // The leading block calls these two in turn. plan() waits a short time for something to run,
    // and decides about the next pass. is_cancelled() tells whether the whole batch shall end.
    template <class IsCancelled>
    void plan(BatchPass* next, IsCancelled is_cancelled) {
        std::unique_lock lock(mutex_);
        changed_.wait_for(lock, kBeat, [&] { return is_cancelled() || can_run(); });
        *next = {};
        next->ends = is_cancelled() ? 1 : 0;
        admit(next);
        lock.unlock();
        drop(next->ends != 0);
        if (next->ends == 0) fill(next);
    }
    // Chooses the tokens of all members from the pass's logits.
    void choose(const Pass& pass);

  private:
    // How long plan() waits at most. All other blocks wait for it, and their waits have a limit.
    static constexpr std::chrono::milliseconds kBeat{5};

    bool can_run() const;
    void admit(BatchPass* next);
    void drop(bool everyone);
    void fill(BatchPass* next);
    void add_following(Member& member, uint32_t most, BatchPass* next);
    void add_prompt(Member& member, uint32_t most, BatchPass* next);
    void choose(Member& member, const Pass& pass);
    bool choose_next(Member& member, const float* logits, uint32_t column);
    void follow_masks(Member& member);
    void end_pass(Member& member, uint32_t num_accepted);
    void deliver(Member& member, const KcclEngineToken& token);
    void forget_ended();

    const KcclEngineModel& model_;
    const Floats logits_;
    Sampler sampler_;
    // The members of state kRuns, in the order in which they joined. Only the leading block uses
    // it.
    Member* running_[kKcclEngineMaxMembers] = {};
    uint32_t num_running_ = 0;

    std::mutex mutex_;
    std::condition_variable changed_;
    bool is_running_ = false;
    Member members_[kKcclEngineMaxMembers];
    Member* joined_[kKcclEngineMaxMembers] = {};  // those of state kJoined, in their order
    uint32_t num_joined_ = 0;
};

}  // namespace kccl::engine
