// Makes the tokens of a request. A pass (a run over a few positions, the columns) runs the last
// token, and drafts behind it. From the logits of its columns the leading block (block 0 of rank 0)
// chooses tokens in their order, each from the logits behind all tokens before it, as without
// drafts. It stops behind the first token that differs from its draft.
//
// A rejected draft leaves keys and values in the cache. The next pass begins at the first position
// of a rejected draft. A query sees only positions up to its own. This pass or an earlier one has
// written all of these by then, so nothing reads what the draft has left.
#include <algorithm>
#include <limits>

#include "engine.h"

using kccl::engine::Chosen;
using kccl::engine::Decision;
using kccl::engine::kColumns;
using kccl::engine::Pass;

void KcclEngine::generate(Pass& pass) {
    const uint32_t last_op = model.num_ops - 3;
    if (!prefill(pass, last_op)) return;
    if (pass.block().leads()) answer.begin(request);
    uint32_t column = (request.num_ids - request.start - 1) % kColumns;
    uint32_t position = request.num_ids;
    Decision decision = {};
    for (uint32_t pass_number = 0;; ++pass_number) {
        if (!choose_tokens(pass, column, position, pass_number, &decision)) return;
        if (decision.num_next == 0) return;
        position += decision.num_tokens;
        if (!pass.run(decision.next, decision.num_next, position - 1, last_op)) return;
        column = 0;
    }
}

// Chooses tokens for `position` and those behind it, from the logits of a pass's columns from
// `column` on. On entry *decision has the drafts of this pass. On return it has the leading block's
// new decision. Returns false if a wait failed.
bool KcclEngine::choose_tokens(Pass& pass, uint32_t column, uint32_t position, uint32_t pass_number,
                               Decision* decision) {
    if (!pass.make_logits(column, 1 + decision->num_drafts())) return false;
    if (pass.block().leads()) return lead(pass, position, pass_number, decision);
    const uint32_t step = pass.publish();
    if (!pass.block().await(step, 0, 0, 1)) return false;
    const Decision asked = *decision;
    *decision = *decision_there();
    for (uint32_t i = 0; pass.block().index() == 0 && i < decision->num_tokens; ++i) {
        if (decision->tokens[i].id >= 0 && request.num_alternatives != 0) {
            // As in the leading block, the sampler adds up the exponentials of the logits (measure)
            // from which alternatives are taken. Nothing overwrites these logits before the next
            // pass, which needs this block.
            pass.read_logits(i, logits.get());
            sampler.measure(logits.get(), model.vocab_size);
        }
        deliver_chosen(decision->tokens[i], i, pass_number, asked);
    }
    return true;
}

// Chooses tokens as the leading block, and tells the other blocks. Returns false if a wait failed.
bool KcclEngine::lead(Pass& pass, uint32_t position, uint32_t pass_number, Decision* decision) {
    const Decision asked = *decision;
    Decision found = {};
    uint32_t num_accepted = 0;
    bool is_draft = true;
    while (is_draft) {
        const uint32_t column = found.num_tokens++;
        Chosen& chosen = found.tokens[column];
        pass.read_logits(column, logits.get());
        if (!choose(position + column, &chosen)) return false;
        // The token is delivered at once, because Python posts the next mask only when it has this
        // token (mask.h).
        deliver_chosen(chosen, column, pass_number, asked);
        is_draft = asked.proposes(column, chosen.id);
        num_accepted += is_draft ? 1 : 0;
        if (chosen.end != kKcclEngineGoesOn) break;
    }
    answer.drafts.learn(asked.num_drafts(), num_accepted);
    const Chosen& last = found.tokens[found.num_tokens - 1];
    if (last.end == kKcclEngineGoesOn) {
        const uint32_t following = position + found.num_tokens;
        found.next[0] = last.id;
        found.num_next =
            1 + answer.drafts.propose(answer.history.get(), following,
                                      answer.room_for_drafts(following), found.next + 1);
    }
    *decision = *decision_there() = found;
    pass.publish();
    return true;
}

// Chooses the token for a position from `logits`, and whether the request ends with it. Returns
// false if the wait for the position's mask failed.
bool KcclEngine::choose(uint32_t position, Chosen* chosen) {
    const bool is_masked = request.is_masked != 0;
    if (is_masked && !answer.mask.await(team.comm, position, [this] { return is_cancelled(); }))
        return false;
    if (is_cancelled()) {
        *chosen = {-1, kKcclEngineCancelled, std::numeric_limits<double>::quiet_NaN()};
        return true;
    }
    *chosen = answer.choose(logits.get(), position, is_masked, sampler);
    return true;
}

// Gives the caller of the C interface a token that was chosen from a column of a pass. asked: the
// decision with this pass's drafts. If the request wants alternatives, the sampler must have
// measured that column's logits before.
void KcclEngine::deliver_chosen(const Chosen& chosen, uint32_t column, uint32_t pass_number,
                                const Decision& asked) {
    KcclEngineToken token =
        token_of(chosen, request.num_alternatives, logits.get(), model.vocab_size, sampler);
    token.pass = pass_number;
    token.num_drafts = asked.num_drafts();
    token.is_draft = asked.proposes(column, chosen.id) ? 1 : 0;
    deliver(token);
}

void KcclEngine::deliver(const KcclEngineToken& token) {
    const std::lock_guard lock(mutex);
    tokens[num_tokens++] = token;
    changed.notify_all();
}
