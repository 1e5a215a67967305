// Chooses a token where it is not simply the most likely one, as sample.py does.
//
// Everything after the logits is computed in double precision. The token is the id with the largest
// *key*, score plus noise, of those that the filters (top_k, top_p, min_p) keep. Ids are ordered by
// score, the largest first; of equal scores the lower id comes first. The filters keep a beginning
// of this order. So nothing needs to be sorted:
//
// 1. All blocks find the best id of all, x, and the largest score.
// 2. They sum up what the filters ask of x, over the ids before it in the order. If the filters
//    keep x, it is the token. If not, they keep no id at or behind x. Then the best id before x,
//    which the same pass over the logits has found, becomes x, and step 2 is repeated.
//
// The filters keep the first x with a probability that equals the share of all weight that the kept
// ids have. So a choice usually takes about two exchanges.
//
// top_p is a share of the weight that top_k keeps. This weight is not known, but each exchange
// narrows it down by a pivot, a score. If at most k scores are not below the pivot, top_k keeps
// them all. If at least k are not below it, top_k keeps no other ones. The pivot halves the range
// between, until x is decided. That takes about two more exchanges.
//
// Weights (exponentials of scores) are summed as integers. So the sums, and the tokens, do not
// depend on the numbers of blocks and ranks.
#pragma once

#include "choosers.cuh"
#include "gumbel.cuh"
#include "scores.cuh"

namespace kccl::decode {

// The token, and its log-probability, which is NaN unless it is wanted.
struct Chosen {
    int32_t id;
    float logprob;
};

constexpr uint32_t kNoNumber = 0x7fc00000;  // the bits of a NaN

// Tells whether a request's tokens are simply the most likely ones.
KCCL_DECODE bool is_greedy(const Task& task) {
    return !(task.sampling.temperature > 0) && task.sampling.wants_logprobs == 0 &&
           task.marks == 0 && task.counts == 0 && task.logit_biases == 0 && task.mask == 0;
}

// Chooses one token. All choosers of all blocks make an object, and call choose() together.
// CHOOSERS says who they are (choosers.cuh).
template <class S, template <class> class CHOOSERS>
class Sampler {
  public:
    // Prepares the choice of the token at `position` from the logits of a column. All warps must
    // have met since the logits were stored. `peak`: the largest of them; all are finite.
    KCCL_DECODE Sampler(ConsumerWarp<S>& consumer, uint32_t position, float peak, uint32_t column)
        : consumer_(consumer),
          choosers_(consumer, column),
          column_(column),
          task_(task_of<S>(consumer.task(), column)),
          rules_(task_.sampling),
          position_(position),
          is_random_(rules_.temperature > 0),
          peak_(double{peak}) {}

    // Makes the choice, and sets *chosen. Its id is -1 if no id may be chosen. Returns false if a
    // wait failed.
    KCCL_DECODE bool choose(Chosen* chosen) {
        if (!choosers_.fetch_mask(task_)) return false;
        const uint32_t top_k = is_random_ ? rules_.top_k : 0;
        const uint32_t k = top_k == 0 || top_k > S::kVocab ? S::kVocab : top_k;
        const double top_p = is_random_ ? rules_.top_p : 1, min_p = is_random_ ? rules_.min_p : 0;
        const bool needs_sums = k < S::kVocab || top_p < 1 || rules_.wants_logprobs != 0;
        choosers_.read_before(rules_.wants_logprobs != 0 ? kNumControlWords
                              : needs_sums || min_p > 0  ? kAll
                                                         : kReached);
        // The k-th largest score lies between low and high. The weight of all scores that are not
        // below it lies between least and most. Scores below the first `low` weigh nothing.
        double low = 0, high = 0;
        uint64_t least = kOne, most = 0;  // most = 0: not known yet
        for (bool is_kept = false; !is_kept;) {
            look();
            if (!choosers_.exchange()) return false;
            if (is_first_) {
                is_first_ = false;
                if (found_candidate(kBest).id < 0) {
                    // No id may be chosen.
                    chosen->id = -1;
                    return true;
                }
                high = largest_ = found_candidate(kBelow).key;
                low = high - kSpan;
                pivot_ = k == S::kVocab ? kLowest : low + (high - low) / 2;
                x_ = found_candidate(kBest);
                is_kept = !needs_sums && !(min_p > 0);
                if (is_kept) continue;
                if (!take(x_)) return false;
                is_kept = !needs_sums && !(share_of_x() < min_p);
                continue;
            }
            const Tally before = found_tally(kBefore), from_pivot = found_tally(kFromPivot);
            if (from_pivot.num <= k && from_pivot.weight > least) least = from_pivot.weight;
            if (from_pivot.num >= k) {
                most = from_pivot.weight;
                low = -found_candidate(kReached).key;
            } else {
                const Candidate below = found_candidate(kBelow);
                high = below.id < 0 ? kLowest : below.key;
            }
            if (!(low < high)) {
                // The weight that top_k keeps is known now: either the k-th largest score is `low`,
                // or it is so low that the other ids that top_k keeps have the weight 0.
                if (most == 0) most = least;
                least = most;
            }
            const auto weight = static_cast<double>(before.weight);
            const bool is_out =
                before.num >= k || share_of_x() < min_p ||
                (top_p < 1 && most != 0 && weight >= top_p * static_cast<double>(most));
            is_kept = !is_out && (!(top_p < 1) || weight < top_p * static_cast<double>(least));
            if (is_out && !take(found_candidate(kBest))) return false;
            if (least != most) {
                pivot_ = low + (high - low) / 2;
                if (!(pivot_ > low)) pivot_ = high;
            }
        }
        chosen->id = x_.id;
        if (rules_.wants_logprobs == 0) return true;
        const double log_sum = logarithm(static_cast<double>(found_tally(kAll).weight) / kOne);
        chosen->logprob = logprob_of(x_.logit, log_sum);
        return list_alternatives(log_sum);
    }

  private:
    using Head = typename Shape<S>::Head;
    // kOne: the weight of the largest score. The weight of a score that is lower by kSpan rounds to
    // 0.
    static constexpr uint64_t kOne = uint64_t{1} << 44;
    static constexpr double kSpan = 32;
    static constexpr double kLowest = -1.7976931348623157e308;
    static_assert(S::kVocab <= 1u << 19, "all weights together have 64 bits");

    // Goes over this thread's share of the block's logits, and finds all that the next exchange
    // needs.
    KCCL_DECODE void look() {
        Candidate best = {0, 0, -1, false}, below = best, reached = best;
        Tally before = {0, 0}, from_pivot = {0, 0}, all = {0, 0};
        const Cut tiles = Shape<S>::head_tiles_of(consumer_.block());
        const uint32_t first_float4 = Shape<S>::first_head_row_of(consumer_.comm().rank) / 4;
        const uint32_t end = (tiles.first + tiles.num) * kTileFloat4s;
#pragma unroll 1
        for (uint32_t index4 = tiles.first * kTileFloat4s + choosers_.thread(); index4 < end;
             index4 += CHOOSERS<S>::kThreads) {
            const Float4 logits = load_float4(own_logits(), index4);
            const uint32_t seen = seen_of(task_, index4);
            const uint32_t allowed = choosers_.allowed(task_, (first_float4 + index4) * 4);
            Philox words = {};
            if (is_random_) words = philox(rules_.seed, first_float4 + index4, position_);
            // Unrolling this loop would be faster here, but would take registers from the ops.
#pragma unroll 1
            for (uint32_t i = 0; i < 4; ++i) {
                const auto id = static_cast<int32_t>((first_float4 + index4) * 4 + i);
                const float logit = logits.value[i];
                if (!is_first_ && rules_.wants_logprobs != 0) {
                    all.weight += weight_of(double{logit} - peak_);
                }
                if ((allowed >> i & 1u) == 0) continue;
                const bool is_seen = (seen >> i & 1u) != 0;
                const double score = score_of_row(task_, logit, is_seen, index4 * 4 + i);
                const bool is_larger = is_first_ || score > x_score_;
                const bool is_before = is_larger || (score == x_score_ && id < x_.id);
                const bool needs_weight = !is_first_ && (is_before || score >= pivot_);
                const uint64_t weight = needs_weight ? weight_of(score - largest_) : 0;
                if (is_before) {
                    before.weight += weight;
                    before.num += is_larger ? 1 : 0;
                    const double noise = is_random_ ? gumbel(words.word[i]) : 0;
                    best = better(best, Candidate{score + noise, logit, id, is_seen});
                }
                if (!is_first_ && score >= pivot_) {
                    from_pivot.weight += weight;
                    ++from_pivot.num;
                    reached = better(reached, Candidate{-score, 0, 0, false});
                } else {
                    below = better(below, Candidate{score, 0, 0, false});
                }
            }
        }
        ControlWord control_words[kNumControlWords] = {
            control_word_of(best),   control_word_of(below),      control_word_of(reached),
            control_word_of(before), control_word_of(from_pivot), control_word_of(all)};
        choosers_.store(kBest, control_words);
    }

    // Reports the ids with the largest logits to the host, even those that may not be chosen. The
    // likeliest comes first; of equally likely ones, the lowest id. Each id takes an exchange.
    // Returns false if a wait failed.
    KCCL_DECODE bool list_alternatives(double log_sum) {
        const Task& task = task_;
        Candidate last = {0, 0, -1, false};
#pragma unroll 1
        for (uint32_t i = 0; i < task.num_alternatives; ++i) {
            look_behind(last);
            if (!choosers_.exchange()) return false;
            last = found_candidate(kBest);
            if (consumer_.block() != 0 || !choosers_.lead()) continue;
            const uint64_t token = position_ - task.num_ids;
            mem::store_packet<mem::Scope::kSystem>(
                reinterpret_cast<mem::Packet*>(task.alternatives) +
                    token * kKcclEngineMaxAlternatives + i,
                token_packet(task, static_cast<uint32_t>(last.id),
                             logprob_of(last.logit, log_sum)));
        }
        return true;
    }

    // Finds, in this thread's share of the block's logits, the likeliest id behind `last` in the
    // order of logits (of equal logits the lower id comes first), or the likeliest of all ids if
    // `last` is none. Stores the best id of the warp in shared memory.
    KCCL_DECODE void look_behind(const Candidate& last) {
        Candidate best = {0, 0, -1, false};
        const Cut tiles = Shape<S>::head_tiles_of(consumer_.block());
        const uint32_t first_id = Shape<S>::first_head_row_of(consumer_.comm().rank);
        const auto* const own = reinterpret_cast<const float*>(own_logits());
        const uint32_t end = (tiles.first + tiles.num) * kTileRows;
#pragma unroll 1
        for (uint32_t row = tiles.first * kTileRows + choosers_.thread(); row < end;
             row += CHOOSERS<S>::kThreads) {
            const float logit = mem::load_plain(own + row);
            const auto id = static_cast<int32_t>(first_id + row);
            const bool is_behind =
                last.id < 0 || logit < last.logit || (logit == last.logit && id > last.id);
            if (is_behind) best = better(best, Candidate{double{logit}, logit, id, false});
        }
        ControlWord control[1] = {control_word_of(best)};
        choosers_.store(kBest, control);
    }

    KCCL_DECODE float logprob_of(float logit, double log_sum) const {
        return static_cast<float>(double{logit} - peak_ - log_sum);
    }

    KCCL_DECODE static uint64_t weight_of(double below_peak) {
        return static_cast<uint64_t>(exponential(below_peak) * kOne + 0.5);
    }

    // Returns the address of this rank's logits of the column.
    KCCL_DECODE uint64_t own_logits() const { return own_logits_at<S>(consumer_.task(), column_); }

    // Returns how likely x is, divided by how likely the most likely id is.
    KCCL_DECODE double share_of_x() const { return exponential(x_score_ - largest_); }

    // Makes a candidate the next x, and finds its score, if need be by an exchange. Returns false
    // if a wait failed.
    KCCL_DECODE bool take(const Candidate& candidate) {
        const Task& task = task_;
        x_ = candidate;
        if (!needs_row(task)) {
            x_score_ = score_of(task, double{x_.logit}, x_.is_seen, 0);
            return true;
        }
        // Only the block that has the id's row knows the score. It publishes the score's bits in a
        // sum, to which all other blocks add 0.
        uint32_t row = 0;
        Tally told = {0, 0};
        if (choosers_.is_first_warp() && finds_row(consumer_, x_.id, &row)) {
            told.weight =
                platform::bit_cast<uint64_t>(score_of_row(task, x_.logit, x_.is_seen, row));
        }
        choosers_.leave(kBefore, control_word_of(told));
        if (!choosers_.exchange()) return false;
        x_score_ = platform::bit_cast<double>(found_tally(kBefore).weight);
        return true;
    }

    KCCL_DECODE Candidate found_candidate(ControlWordKind kind) const {
        return candidate_of(choosers_.found(kind));
    }
    KCCL_DECODE Tally found_tally(ControlWordKind kind) const {
        return tally_of(choosers_.found(kind));
    }

    ConsumerWarp<S>& consumer_;
    CHOOSERS<S> choosers_;
    const uint32_t column_;
    const Task& task_;  // of the column's request
    const Sampling& rules_;
    const uint32_t position_;
    const bool is_random_;
    const double peak_;
    bool is_first_ = true;
    double largest_ = 0;
    double pivot_ = 0;
    Candidate x_ = {0, 0, -1, false};
    double x_score_ = 0;
};

}  // namespace kccl::decode
