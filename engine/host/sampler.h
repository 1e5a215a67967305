// Chooses the next token, as sample.py does. Everything after the logits is computed in double
// precision.
#pragma once

#include <vector>

#include "api.h"

namespace kccl::engine {

class Sampler {
  public:
    // Chooses the token for a position. history: all ids so far, the oldest first. mask: a bit for
    // each id, which tells whether it may be chosen; null if all may. Returns the id, or -1 if a
    // logit is NaN or no id that may be chosen has a finite one. Sets *logprob if the request wants
    // it.
    int32_t choose(const float* logits, uint32_t vocab_size, const KcclEngineRequest& request,
                   uint32_t position, const int32_t* history, uint32_t num_history,
                   const uint32_t* mask, double* logprob);

    // Adds up the exponentials of these logits, which their log-probabilities need. choose() does
    // so itself if the request wants a log-probability.
    void measure(const float* logits, uint32_t vocab_size);

    // Writes the likeliest ids of the logits that were measured last, at most `most`. The likeliest
    // comes first; of equal ones, the lowest id. Returns how many it has written.
    uint32_t alternatives(const float* logits, uint32_t vocab_size, uint32_t most,
                          KcclEngineAlternative* out);

  private:
    struct Candidate {
        double score;
        int32_t id;
    };
    void adjust(const KcclEngineRequest& request, const int32_t* history, uint32_t num_history);
    double logprob_of(float logit) const { return double{logit} - peak_ - log_sum_; }
    void keep_top_k(uint32_t k);
    void keep_likely(double top_p, double min_p);

    std::vector<double> scores_;
    std::vector<uint32_t> counts_;
    std::vector<Candidate> kept_;
    double peak_ = 0, log_sum_ = 0;
};

}  // namespace kccl::engine
