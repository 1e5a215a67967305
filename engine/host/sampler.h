// How the next token is chosen: sample.py in C++. Everything after the logits is double.
#pragma once

#include <vector>

#include "api.h"

namespace kccl::engine {

class Sampler {
  public:
    // history: all ids so far, ascending in time.
    // Returns the id; -1 if a logit is NaN or none is finite. *logprob is set if it is wanted.
    int32_t choose(const float* logits, uint32_t vocab_size, const KcclEngineRequest& request,
                   uint32_t position, const int32_t* history, uint32_t num_history,
                   double* logprob);

  private:
    struct Candidate {
        double score;
        int32_t id;
    };
    void keep_top_k(uint32_t k);
    void keep_likely(double top_p, double min_p);

    std::vector<double> scores_;
    std::vector<uint8_t> seen_;
    std::vector<Candidate> kept_;
};

}  // namespace kccl::engine
