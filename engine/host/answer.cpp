#include "answer.h"

#include <algorithm>
#include <limits>

namespace kccl::engine {

void Answer::begin(const KcclEngineRequest& the_request) {
    request = the_request;
    std::copy_n(reinterpret_cast<const int32_t*>(request.ids), request.num_ids, history.get());
    drafts.begin(request);
}

Chosen Answer::choose(const float* logits, uint32_t position, bool is_masked, Sampler& sampler) {
    Chosen chosen = {-1, kKcclEngineGoesOn, std::numeric_limits<double>::quiet_NaN()};
    chosen.id = sampler.choose(logits, model.vocab_size, request, position, history.get(), position,
                               is_masked ? mask.words() : nullptr, &chosen.logprob);
    const auto* stops = reinterpret_cast<const int32_t*>(request.stop_ids);
    const auto* end = stops + request.num_stop_ids;
    chosen.end = chosen.id < 0                                          ? kKcclEngineBadLogits
                 : std::find(stops, end, chosen.id) != end              ? kKcclEngineStopId
                 : position + 1 - request.num_ids == request.max_tokens ? kKcclEngineMaxTokens
                 : position + 1 == model.context                        ? kKcclEngineContextFull
                                                                        : kKcclEngineGoesOn;
    history[position] = chosen.id;
    return chosen;
}

uint32_t Answer::room_for_drafts(uint32_t position) const {
    const uint32_t num_tokens = position - request.num_ids;
    return std::min(request.max_tokens - num_tokens, model.context - position) - 1;
}

KcclEngineToken cancelled_token() {
    KcclEngineToken token = {};
    token.id = -1;
    token.end = kKcclEngineCancelled;
    token.logprob = std::numeric_limits<double>::quiet_NaN();
    token.time_ns = kccl_host_clock_ns();
    return token;
}

KcclEngineToken token_of(const Chosen& chosen, uint32_t num_alternatives, const float* logits,
                         uint32_t vocab_size, Sampler& sampler) {
    KcclEngineToken token = {};
    token.id = chosen.id;
    token.end = chosen.end;
    token.logprob = chosen.logprob;
    token.time_ns = kccl_host_clock_ns();
    if (chosen.id >= 0 && num_alternatives != 0) {
        token.num_alternatives =
            sampler.alternatives(logits, vocab_size, num_alternatives, token.alternatives);
    }
    return token;
}

}  // namespace kccl::engine
