#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "compute.h"

namespace kccl::engine {
namespace {

// Four random words, as philox() returns them: Philox4x32-10 (Salmon et al., SC 2011) with the key
// `seed`.
struct Philox {
    uint32_t word[4];
};

Philox philox(uint64_t seed, uint32_t counter, uint32_t position) {
    uint32_t a = counter, b = position, c = 0, d = 0;
    auto k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    for (int round = 0; round < 10; ++round) {
        const uint64_t p = uint64_t{0xD2511F53} * a, q = uint64_t{0xCD9E8D57} * c;
        a = static_cast<uint32_t>(q >> 32) ^ b ^ k0;
        c = static_cast<uint32_t>(p >> 32) ^ d ^ k1;
        b = static_cast<uint32_t>(q);
        d = static_cast<uint32_t>(p);
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
    return {{a, b, c, d}};
}

double gumbel(uint32_t word) {
    const double u = (word + 0.5) / 4294967296.0;
    return -std::log(-std::log1p(-u));
}

// Returns an upper bound of gumbel(word), which is cheaper to compute. It follows from gumbel(word)
// <= -log(u).
double most_gumbel(uint32_t word) {
    const int zeros = word == 0 ? 33 : __builtin_clz(word);
    return (zeros + 1) * 0.69314718055994531;
}

bool may_choose(const uint32_t* mask, uint32_t id) { return (mask[id / 32] >> id % 32 & 1) != 0; }

// Returns the likeliest of the ids that may be chosen, and of equal ones the lowest. Returns -1 if
// none of them has a finite logit.
int32_t likeliest(const float* logits, uint32_t vocab_size, const uint32_t* mask) {
    int32_t best = -1;
    float most = -std::numeric_limits<float>::infinity();
    for (uint32_t first = 0; first < vocab_size; first += 32) {
        for (uint32_t bits = mask[first / 32]; bits != 0; bits &= bits - 1) {
            const uint32_t id = first + static_cast<uint32_t>(__builtin_ctz(bits));
            if (id >= vocab_size || logits[id] <= most) continue;
            most = logits[id];
            best = static_cast<int32_t>(id);
        }
    }
    return best;
}

bool is_before(double score, int32_t id, double other_score, int32_t other_id) {
    return score != other_score ? score > other_score : id < other_id;
}

}  // namespace

int32_t Sampler::choose(const float* logits, uint32_t vocab_size, const KcclEngineRequest& request,
                        uint32_t position, const int32_t* history, uint32_t num_history,
                        const uint32_t* mask, double* logprob) {
    const KcclEngineSampling& how = request.sampling;
    const Peak peak = compute().peak(logits, vocab_size);
    if (peak.has_nan || !std::isfinite(peak.value)) return -1;
    auto chosen =
        mask == nullptr ? static_cast<int32_t>(peak.index) : likeliest(logits, vocab_size, mask);
    if (chosen < 0) return -1;
    const bool is_plain = how.temperature <= 0 && how.repetition_penalty == 1 &&
                          request.presence_penalty == 0 && request.frequency_penalty == 0 &&
                          request.num_biases == 0;
    if (!is_plain) {
        scores_.assign(logits, logits + vocab_size);
        for (uint32_t i = 0; mask != nullptr && i < vocab_size; ++i) {
            if (!may_choose(mask, i)) scores_[i] = -std::numeric_limits<double>::infinity();
        }
        adjust(request, history, num_history);
    }
    if (is_plain) {
        // `chosen` is the likeliest id already.
    } else if (how.temperature <= 0) {
        chosen = 0;
        for (uint32_t i = 1; i < vocab_size; ++i) {
            if (scores_[i] > scores_[chosen]) chosen = static_cast<int32_t>(i);
        }
    } else {
        kept_.clear();
        for (uint32_t i = 0; i < vocab_size; ++i) {
            if (mask != nullptr && !may_choose(mask, i)) continue;
            kept_.push_back({scores_[i] / how.temperature, static_cast<int32_t>(i)});
        }
        keep_top_k(how.top_k);
        keep_likely(how.top_p, how.min_p);
        double best = -std::numeric_limits<double>::infinity();
        int64_t drawn = -1;
        Philox words = {};
        for (const Candidate& each : kept_) {
            if (each.id / 4 != drawn) {
                drawn = each.id / 4;
                words = philox(how.seed, static_cast<uint32_t>(drawn), position);
            }
            const uint32_t word = words.word[each.id % 4];
            if (each.score + most_gumbel(word) < best) continue;
            const double score = each.score + gumbel(word);
            if (score > best) {
                best = score;
                chosen = each.id;
            }
        }
    }
    if (how.wants_logprobs != 0) {
        measure(logits, vocab_size);
        *logprob = logprob_of(logits[chosen]);
    }
    return chosen;
}

// Adds biases to scores_, then applies the penalties of ids that the text has.
void Sampler::adjust(const KcclEngineRequest& request, const int32_t* history,
                     uint32_t num_history) {
    const auto* ids = reinterpret_cast<const int32_t*>(request.bias_ids);
    const auto* biases = reinterpret_cast<const double*>(request.biases);
    for (uint32_t i = 0; i < request.num_biases; ++i) scores_[ids[i]] += biases[i];
    if (request.sampling.repetition_penalty != 1) {
        counts_.assign(scores_.size(), 0);
        for (uint32_t i = 0; i < num_history; ++i) {
            if (counts_[history[i]]++ != 0) continue;
            double& score = scores_[history[i]];
            score = score > 0 ? score / request.sampling.repetition_penalty
                              : score * request.sampling.repetition_penalty;
        }
    }
    if (request.presence_penalty != 0 || request.frequency_penalty != 0) {
        const uint32_t first = std::min(request.num_ids, num_history);
        counts_.assign(scores_.size(), 0);
        for (uint32_t i = first; i < num_history; ++i) ++counts_[history[i]];
        for (uint32_t i = first; i < num_history; ++i) {
            uint32_t& count = counts_[history[i]];
            // Each id is penalised once.
            if (count == 0) continue;
            scores_[history[i]] -= request.frequency_penalty * count + request.presence_penalty;
            count = 0;
        }
    }
}

void Sampler::measure(const float* logits, uint32_t vocab_size) {
    peak_ = compute().peak(logits, vocab_size).value;
    double sum = 0;
    for (uint32_t i = 0; i < vocab_size; ++i) sum += std::exp(double{logits[i]} - peak_);
    log_sum_ = std::log(sum);
}

uint32_t Sampler::alternatives(const float* logits, uint32_t vocab_size, uint32_t most,
                               KcclEngineAlternative* out) {
    uint32_t num = 0;
    for (uint32_t i = 0; i < vocab_size; ++i) {
        if (num == most && (most == 0 || logits[i] <= logits[out[num - 1].id])) continue;
        // The id goes behind ids that are as likely, because these are lower.
        uint32_t at = num < most ? num++ : num - 1;
        for (; at > 0 && logits[out[at - 1].id] < logits[i]; --at) out[at] = out[at - 1];
        out[at].id = static_cast<int32_t>(i);
    }
    for (uint32_t i = 0; i < num; ++i) out[i].logprob = logprob_of(logits[out[i].id]);
    return num;
}

// Keeps the candidates whose scores are not below the k-th largest score. k = 0 keeps all.
void Sampler::keep_top_k(uint32_t k) {
    if (k == 0 || k >= kept_.size()) return;
    scores_.clear();
    for (const Candidate& each : kept_) scores_.push_back(each.score);
    std::nth_element(scores_.begin(), scores_.begin() + (k - 1), scores_.end(),
                     std::greater<double>());
    const double least = scores_[k - 1];
    std::erase_if(kept_, [least](const Candidate& each) { return each.score < least; });
}

// Keeps the most likely ids until their probabilities sum to top_p, and of these the ones that are
// at least min_p as likely as the most likely one. Leaves them in the order of their ids.
void Sampler::keep_likely(double top_p, double min_p) {
    if (top_p >= 1 && min_p <= 0) return;
    const auto is_less = [](const Candidate& a, const Candidate& b) {
        return is_before(b.score, b.id, a.score, a.id);
    };
    double peak = kept_[0].score;
    for (const Candidate& each : kept_) peak = std::max(peak, each.score);
    double total = 0;
    for (const Candidate& each : kept_) total += std::exp(each.score - peak);
    // The candidates become a heap, not a sorted list, because few of many are kept.
    std::make_heap(kept_.begin(), kept_.end(), is_less);
    auto end = kept_.end();
    double before = 0;
    while (end != kept_.begin()) {
        const double weight = std::exp(kept_.front().score - peak);
        if (weight < min_p || (top_p < 1 && before >= top_p * total)) break;
        before += weight;
        std::pop_heap(kept_.begin(), end--, is_less);
    }
    kept_.erase(kept_.begin(), end);
    std::sort(kept_.begin(), kept_.end(),
              [](const Candidate& a, const Candidate& b) { return a.id < b.id; });
}

}  // namespace kccl::engine

extern "C" int32_t kccl_engine_sample(const float* logits, uint32_t vocab_size,
                                      const KcclEngineRequest* request, uint32_t position,
                                      const int32_t* history, uint32_t num_history,
                                      const uint32_t* mask, double* logprob,
                                      KcclEngineAlternative* alternatives) {
    kccl::engine::Sampler sampler;
    const int32_t id =
        sampler.choose(logits, vocab_size, *request, position, history, num_history, mask, logprob);
    if (id >= 0) sampler.alternatives(logits, vocab_size, request->num_alternatives, alternatives);
    return id;
}
