#include "sampler.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "compute.h"

namespace kccl::engine {
namespace {

// Four words of Philox4x32-10 (Salmon et al., SC 2011) with the key `seed`.
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

// Not below gumbel(word), which is at most -log(u).
double most_gumbel(uint32_t word) {
    const int zeros = word == 0 ? 33 : __builtin_clz(word);
    return (zeros + 1) * 0.69314718055994531;
}

bool is_before(double score, int32_t id, double other_score, int32_t other_id) {
    return score != other_score ? score > other_score : id < other_id;
}

}  // namespace

int32_t Sampler::choose(const float* logits, uint32_t vocab_size, const KcclEngineRequest& request,
                        uint32_t position, const int32_t* history, uint32_t num_history,
                        double* logprob) {
    const Peak peak = compute().peak(logits, vocab_size);
    if (peak.has_nan || !std::isfinite(peak.value)) return -1;
    const bool is_plain = request.temperature <= 0 && request.repetition_penalty == 1;
    if (!is_plain) scores_.assign(logits, logits + vocab_size);
    if (request.repetition_penalty != 1) {
        seen_.assign(vocab_size, 0);
        for (uint32_t i = 0; i < num_history; ++i) {
            const int32_t id = history[i];
            if (seen_[id] != 0) continue;
            seen_[id] = 1;
            double& score = scores_[id];
            score =
                score > 0 ? score / request.repetition_penalty : score * request.repetition_penalty;
        }
    }
    auto chosen = static_cast<int32_t>(is_plain ? peak.index : 0);
    if (is_plain) {
        // The likeliest.
    } else if (request.temperature <= 0) {
        for (uint32_t i = 1; i < vocab_size; ++i) {
            if (scores_[i] > scores_[chosen]) chosen = static_cast<int32_t>(i);
        }
    } else {
        kept_.clear();
        for (uint32_t i = 0; i < vocab_size; ++i) {
            kept_.push_back({scores_[i] / request.temperature, static_cast<int32_t>(i)});
        }
        keep_top_k(request.top_k);
        keep_likely(request.top_p, request.min_p);
        double best = -std::numeric_limits<double>::infinity();
        int64_t drawn = -1;
        Philox words = {};
        for (const Candidate& each : kept_) {
            if (each.id / 4 != drawn) {
                drawn = each.id / 4;
                words = philox(request.seed, static_cast<uint32_t>(drawn), position);
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
    if (request.wants_logprobs != 0) {
        double sum = 0;
        for (uint32_t i = 0; i < vocab_size; ++i) {
            sum += std::exp(double{logits[i]} - double{peak.value});
        }
        *logprob = double{logits[chosen]} - double{peak.value} - std::log(sum);
    }
    return chosen;
}

// Keeps what is not below the k-th largest.
void Sampler::keep_top_k(uint32_t k) {
    if (k == 0 || k >= kept_.size()) return;
    scores_.clear();
    for (const Candidate& each : kept_) scores_.push_back(each.score);
    std::nth_element(scores_.begin(), scores_.begin() + (k - 1), scores_.end(),
                     std::greater<double>());
    const double least = scores_[k - 1];
    std::erase_if(kept_, [least](const Candidate& each) { return each.score < least; });
}

// Keeps the most likely until their probabilities sum to top_p, and of these the ones at least
// min_p as likely as the most likely one. Leaves them in the order of their ids.
void Sampler::keep_likely(double top_p, double min_p) {
    if (top_p >= 1 && min_p <= 0) return;
    const auto is_less = [](const Candidate& a, const Candidate& b) {
        return is_before(b.score, b.id, a.score, a.id);
    };
    double peak = kept_[0].score;
    for (const Candidate& each : kept_) peak = std::max(peak, each.score);
    double total = 0;
    for (const Candidate& each : kept_) total += std::exp(each.score - peak);
    // A heap, because few are kept of many.
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
