// A request for an answer, as the block that chooses its tokens has it: the ids so far, its drafts
// and its mask.
#pragma once

#include "drafts.h"
#include "mask.h"
#include "sampler.h"

namespace kccl::engine {

struct Answer {
    explicit Answer(const KcclEngineModel& the_model)
        : model(the_model), mask(model.vocab_size), history(zeros<int32_t>(model.context)) {}

    bool is_complete() const { return mask.is_complete() && history; }

    // Begins with the ids of the request's prompt.
    void begin(const KcclEngineRequest& the_request);

    // Chooses the token for a position from its logits, and whether the request ends with it.
    // is_masked: whether the mask says what may be chosen.
    Chosen choose(const float* logits, uint32_t position, bool is_masked, Sampler& sampler);

    // Returns how many drafts may follow the token in front of `position`. The request and the
    // context must have room for one more token behind each draft.
    uint32_t room_for_drafts(uint32_t position) const;

    const KcclEngineModel& model;
    KcclEngineRequest request = {};
    Drafts drafts;
    Mask mask;
    const Array<int32_t> history;  // all ids of the text so far
};

// Returns the last token of a request that was cancelled.
KcclEngineToken cancelled_token();

// Returns the token that the caller of the C interface gets, without what it says of drafts.
// logits: those that it was chosen from. If the request wants alternatives, the sampler must have
// measured them last.
KcclEngineToken token_of(const Chosen& chosen, uint32_t num_alternatives, const float* logits,
                         uint32_t vocab_size, Sampler& sampler);

}  // namespace kccl::engine
