#include "batch.h"

#include <algorithm>

#include "engine.h"

namespace kccl::engine {

Batch::Batch(const KcclEngineModel& model)
    : model_(model),
      logits_(zeros(model.vocab_size)),
      members_{model, model, model, model, model, model, model, model} {
    static_assert(kKcclEngineMaxMembers == 8);
    static_assert(uint32_t{kKcclEngineMaxMembers} <= uint32_t{kKcclEngineLogitColumns});
}

bool Batch::is_complete() const {
    return logits_ && std::all_of(members_, members_ + kKcclEngineMaxMembers,
                                  [](const Member& each) { return each.is_complete(); });
}

// ---- What other threads call --------------------------------------------------------------------

void Batch::begin() {
    const std::lock_guard lock(mutex_);
    num_running_ = num_joined_ = 0;
    for (Member& each : members_) each.state = Member::State::kFree;
    is_running_ = true;
}

void Batch::end() {
    const std::lock_guard lock(mutex_);
    is_running_ = false;
    for (Member& each : members_) each.changed.notify_all();
}

int Batch::join(const KcclEngineRequest& request) {
    const std::lock_guard lock(mutex_);
    auto* const last = members_ + kKcclEngineMaxMembers;
    auto* const member = std::find_if(
        members_, last, [](const Member& each) { return each.state == Member::State::kFree; });
    if (!is_running_ || member == last) return -1;
    if (request.is_masked != 0 && !member->logits) {
        member->logits = zeros(uint64_t{kKcclEngineLogitColumns}, model_.vocab_size);
        if (!member->logits) return -2;
    }
    member->state = Member::State::kJoined;
    member->is_cancelled = member->waits_for_mask = member->is_done = false;
    member->num_tokens = member->num_taken = 0;
    member->answer.mask.reset();
    member->answer.begin(request);
    member->num_cached = request.start;
    member->length = request.num_ids;
    member->pass_number = member->num_columns = 0;
    joined_[num_joined_++] = member;
    changed_.notify_all();
    return static_cast<int>(member - members_);
}

int Batch::next(uint32_t number, KcclEngineToken* token, uint64_t limit_ns) {
    std::unique_lock lock(mutex_);
    Member& member = members_[number];
    const auto is_token = [&] { return member.num_taken < member.num_tokens; };
    const auto has_ended = [&] { return !is_running_ || member.state == Member::State::kEnded; };
    member.changed.wait_for(lock, std::chrono::nanoseconds(limit_ns),
                            [&] { return is_token() || has_ended(); });
    if (!is_token()) return has_ended() ? -1 : 0;
    *token = member.tokens[member.num_taken++];
    return 1;
}

void Batch::post_mask(uint32_t number, uint32_t position, const uint32_t* words) {
    const std::lock_guard lock(mutex_);
    members_[number].answer.mask.post(position, words);
    changed_.notify_all();
}

void Batch::cancel(uint32_t number) {
    const std::lock_guard lock(mutex_);
    members_[number].is_cancelled = true;
    changed_.notify_all();
}

void Batch::wake() {
    const std::lock_guard lock(mutex_);
    changed_.notify_all();
}

int Batch::leave(uint32_t number, uint64_t limit_ns) {
    std::unique_lock lock(mutex_);
    Member& member = members_[number];
    member.is_cancelled = true;
    changed_.notify_all();
    const auto has_ended = [&] { return !is_running_ || member.state == Member::State::kEnded; };
    if (!member.changed.wait_for(lock, std::chrono::nanoseconds(limit_ns), has_ended)) return 0;
    member.state = Member::State::kFree;
    return 1;
}

// ---- The leading block: members -----------------------------------------------------------------

// Tells whether there is something to do: a request that joins or leaves, or one that can run.
bool Batch::can_run() const {
    return num_joined_ != 0 || std::any_of(running_, running_ + num_running_, [](Member* each) {
               return each->is_cancelled || !each->waits_for_mask ||
                      each->answer.mask.is_posted(each->length);
           });
}

// Lets the requests that have joined begin.
void Batch::admit(BatchPass* next) {
    for (uint32_t i = 0; i < num_joined_; ++i) {
        Member& member = *joined_[i];
        const KcclEngineRequest& request = member.answer.request;
        member.state = Member::State::kRuns;
        running_[num_running_++] = &member;
        next->copies[next->num_copies++] = {request.slot, request.source, request.start};
    }
    num_joined_ = 0;
}

// Ends members that are cancelled, or everyone.
void Batch::drop(bool everyone) {
    for (uint32_t i = 0; i < num_running_; ++i) {
        bool is_cancelled;
        {
            const std::lock_guard lock(mutex_);
            is_cancelled = everyone || running_[i]->is_cancelled;
        }
        if (is_cancelled) deliver(*running_[i], cancelled_token());
    }
    forget_ended();
}

// Gives up the members whose last token is chosen. From then on another request may use them.
void Batch::forget_ended() {
    const std::lock_guard lock(mutex_);
    uint32_t num = 0;
    for (uint32_t i = 0; i < num_running_; ++i) {
        Member& member = *running_[i];
        if (!member.is_done) {
            running_[num++] = &member;
            continue;
        }
        member.state = Member::State::kEnded;
        member.changed.notify_all();
    }
    num_running_ = num;
}

void Batch::deliver(Member& member, const KcclEngineToken& token) {
    const std::lock_guard lock(mutex_);
    if (member.is_done) return;
    // A cancelled request may have as many tokens as the context has positions, and its end is one
    // more: the prompt has at least one of these positions.
    member.tokens[member.num_tokens++] = token;
    member.is_done = token.end != kKcclEngineGoesOn;
    member.changed.notify_all();
}

// ---- The leading block: passes ------------------------------------------------------------------

// Decides which columns the next pass has. The columns with logits are shared evenly: drafts take
// what the requests' last tokens leave. Then prompts share the other columns evenly.
void Batch::fill(BatchPass* next) {
    for (uint32_t i = 0; i < num_running_; ++i) follow_masks(*running_[i]);
    forget_ended();
    const uint32_t most = kKcclEngineLogitColumns / std::max(num_running_, 1u);
    uint32_t num_prompts = 0;
    for (uint32_t i = 0; i < num_running_; ++i) {
        Member& member = *running_[i];
        member.num_columns = 0;
        if (member.waits_for_mask) continue;
        if (member.is_in_prompt()) {
            ++num_prompts;
        } else {
            add_following(member, most, next);
        }
    }
    for (uint32_t i = 0; i < num_running_ && num_prompts != 0; ++i) {
        Member& member = *running_[i];
        if (!member.is_in_prompt()) continue;
        add_prompt(member, (kColumns - next->num_columns) / num_prompts--, next);
    }
}

// Adds a text's last token, and drafts: at most `most` columns.
void Batch::add_following(Member& member, uint32_t most, BatchPass* next) {
    Answer& answer = member.answer;
    Decision& asked = member.asked;
    asked.next[0] = answer.history[member.length - 1];
    const uint32_t room = std::min(answer.room_for_drafts(member.length), most - 1);
    asked.num_next =
        1 + answer.drafts.propose(answer.history.get(), member.length, room, asked.next + 1);
    member.num_columns = asked.num_next;
    member.first_logits = next->num_logits;
    for (uint32_t i = 0; i < asked.num_next; ++i) {
        next->logits[next->num_logits++] = next->num_columns;
        next->columns[next->num_columns++] = {asked.next[i], member.length - 1 + i,
                                              answer.request.slot};
    }
}

// Adds the next ids of a prompt, at most `most`, and asks for the logits of its last one.
void Batch::add_prompt(Member& member, uint32_t most, BatchPass* next) {
    const Answer& answer = member.answer;
    member.asked.num_next = 0;
    member.num_columns = std::min(most, answer.request.num_ids - member.num_cached);
    for (uint32_t i = 0; i < member.num_columns; ++i) {
        const uint32_t position = member.num_cached + i;
        next->columns[next->num_columns++] = {answer.history[position], position,
                                              answer.request.slot};
    }
    if (member.num_cached + member.num_columns != answer.request.num_ids) return;
    member.first_logits = next->num_logits;
    next->logits[next->num_logits++] = next->num_columns - 1;
}

void Batch::choose(const Pass& pass) {
    for (uint32_t i = 0; i < num_running_; ++i) {
        Member& member = *running_[i];
        if (member.num_columns == 0) continue;
        if (member.is_in_prompt()) member.num_cached += member.num_columns;
        if (!member.is_in_prompt()) choose(member, pass);
    }
    forget_ended();
}

// Chooses a member's tokens from the logits of its columns, as generate.cpp does for a request that
// runs alone.
void Batch::choose(Member& member, const Pass& pass) {
    if (member.answer.request.is_masked != 0) {
        for (uint32_t i = 0; i < 1 + member.asked.num_drafts(); ++i) {
            pass.read_logits(member.first_logits + i,
                             member.logits.get() + uint64_t{i} * model_.vocab_size);
        }
        member.waits_for_mask = true;
        member.column = 0;
        return;
    }
    uint32_t column = 0;
    do pass.read_logits(member.first_logits + column, logits_.get());
    while (choose_next(member, logits_.get(), column++));
    end_pass(member, column - 1);
}

// Chooses the tokens whose masks are posted. Python posts the next one when it has taken the token.
void Batch::follow_masks(Member& member) {
    while (member.waits_for_mask && member.answer.mask.is_posted(member.length)) {
        const float* logits = member.logits.get() + uint64_t{member.column} * model_.vocab_size;
        if (choose_next(member, logits, member.column)) {
            ++member.column;
        } else {
            member.waits_for_mask = false;
            end_pass(member, member.column);
        }
    }
}

// Ends a member's part of a pass, of whose drafts so many were accepted.
void Batch::end_pass(Member& member, uint32_t num_accepted) {
    member.answer.drafts.learn(member.asked.num_drafts(), num_accepted);
    ++member.pass_number;
}

// Chooses a member's next token from the logits of one of its columns. Returns whether the token
// equals the draft for its place and the request goes on, so that the next column's logits hold.
bool Batch::choose_next(Member& member, const float* logits, uint32_t column) {
    Answer& answer = member.answer;
    const uint32_t position = member.length;
    const bool is_masked = answer.request.is_masked != 0;
    const Chosen chosen = answer.choose(logits, position, is_masked, sampler_);
    KcclEngineToken token =
        token_of(chosen, answer.request.num_alternatives, logits, model_.vocab_size, sampler_);
    token.pass = member.pass_number;
    token.num_drafts = member.asked.num_drafts();
    token.is_draft = member.asked.proposes(column, chosen.id) ? 1 : 0;
    ++member.length;
    deliver(member, token);
    return token.is_draft != 0 && chosen.end == kKcclEngineGoesOn;
}

}  // namespace kccl::engine

// ---- All blocks ---------------------------------------------------------------------------------

void KcclEngine::run_batch(kccl::engine::Pass& pass) {
    const auto* ops = reinterpret_cast<const KcclEngineOp*>(model.ops);
    const uint32_t last_op = model.num_ops - 3;
    uint32_t last_keys = last_op;
    while (last_keys > 0 && ops[last_keys].kind != kKcclEngineQkv) --last_keys;
    auto* const there = reinterpret_cast<kccl::engine::BatchPass*>(team.window[0] + at.batch_pass);
    for (;;) {
        // All blocks have read the last pass, and its logits: they met behind it.
        if (pass.block().leads()) batch.plan(there, [this] { return is_cancelled(); });
        const uint32_t step = pass.publish();
        if (!pass.block().await(step, 0, 0, 1)) return;
        const kccl::engine::BatchPass next = *there;
        if (next.ends != 0) return;
        for (uint32_t i = 0; i < next.num_copies; ++i) pass.copy(next.copies[i]);
        // Without logits nothing reads what would be computed behind the last layer's keys.
        const uint32_t end = next.num_logits != 0 ? last_op : last_keys;
        if (next.num_columns != 0 && !pass.run(next.columns, next.num_columns, end)) return;
        // All blocks wait for each other here, or where the logits are made.
        if (!(next.num_logits != 0 ? pass.make_logits(next.logits, next.num_logits) : pass.meet()))
            return;
        if (pass.block().leads()) batch.choose(pass);
    }
}
