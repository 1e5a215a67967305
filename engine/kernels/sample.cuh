// How a token is chosen where it is not simply the most likely one: sample.py in the kernel.
//
// Everything after the logits is double. The token is the id with the largest *key*, score plus
// noise, of those that the filters keep. They keep a beginning of the order: larger scores first,
// of equal ones the lower id. So nothing is sorted:
//
// 1. All blocks find the best id of all, x, and the largest score.
// 2. They sum up what the filters ask of x, over the ids before it in the order. If the filters
//    keep x, it is the token. If not, they keep no id at or behind x either. Then the best id
//    before x, which the same look at the logits has found, is the next x; and again.
//
// The filters keep x as often as their ids have a share of all. So there are about two exchanges.
//
// top_p's shares are of what top_k keeps. How much that weighs is not known, but each exchange
// narrows it down: scores at and above a pivot, if they are not more than k, are all kept; if not
// fewer, none of the others. The pivot halves what lies between, until x is decided. That takes
// about two more.
//
// Weights are summed as integers. So the sums, and the tokens, do not depend on blocks and ranks.
#pragma once

#include "gumbel.cuh"
#include "head.cuh"

namespace kccl::decode {

// An id that may become the token. Of scores alone that are compared, `key` is the score, and the
// id is 0.
struct Candidate {
    double key;
    float logit;
    int32_t id;  // -1: none
    bool is_seen;
};

KCCL_DEVICE Candidate better(const Candidate& a, const Candidate& b) {
    const bool takes_b =
        b.id >= 0 && (a.id < 0 || b.key > a.key || (b.key == a.key && b.id < a.id));
    return takes_b ? b : a;
}

// Some ids: the sum of their weights, and their number.
struct Tally {
    uint64_t weight;
    uint32_t num;
};

// A note of zeros is none, and an empty tally.
KCCL_DEVICE Note note_of(const Candidate& candidate) {
    const auto key = platform::bit_cast<uint64_t>(candidate.key);
    return {{static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32),
             platform::bit_cast<uint32_t>(candidate.logit)},
            static_cast<uint32_t>(candidate.id + 1) << 1 | (candidate.is_seen ? 1u : 0)};
}

KCCL_DEVICE Candidate candidate_of(const Note& note) {
    return {platform::bit_cast<double>(note.word[0] | uint64_t{note.word[1]} << 32),
            platform::bit_cast<float>(note.word[2]), static_cast<int32_t>(note.small >> 1) - 1,
            (note.small & 1u) != 0};
}

KCCL_DEVICE Note note_of(const Tally& tally) {
    return {
        {static_cast<uint32_t>(tally.weight), static_cast<uint32_t>(tally.weight >> 32), tally.num},
        0};
}

KCCL_DEVICE Tally tally_of(const Note& note) {
    return {note.word[0] | uint64_t{note.word[1]} << 32, note.word[2]};
}

//   kBest       a candidate: the best one before x in the order; at first, of all
//   kBelow      a score: the largest one below the pivot; at first, of all
//   kReached    a score: the smallest one that is not below the pivot; its key is negative
//   kBefore     the ids before x, but only those with larger scores are counted
//   kFromPivot  the ids whose scores are not below the pivot
//   kAll        all ids, their weights being those of the logits: for log-probabilities
KCCL_DEVICE Note combined(uint32_t kind, const Note& a, const Note& b) {
    if (kind < kBefore) return note_of(better(candidate_of(a), candidate_of(b)));
    const Tally one = tally_of(a), other = tally_of(b);
    return note_of(Tally{one.weight + other.weight, one.num + other.num});
}

// All threads get what those of their warp have found.
template <uint32_t N>
KCCL_DEVICE void combine_in_warp(uint32_t first_kind, Note (&notes)[N]) {
#pragma unroll 1
    for (uint32_t step = platform::kWarpSize / 2; step > 0; step /= 2) {
        KCCL_UNROLL
        for (uint32_t i = 0; i < N; ++i) {
            const Note other = platform::shuffle(notes[i], warp().index() ^ step);
            notes[i] = combined(first_kind + i, notes[i], other);
        }
    }
}

// The token, and its log-probability if that is wanted.
struct Chosen {
    int32_t id;
    float logprob;
};

constexpr uint32_t kNoNumber = 0x7fc00000;  // NaN

// One token's choice, by all warps that multiply.
template <class S>
class Sampler {
  public:
    // For the token at `position`. All warps have met since the logits were stored. `peak`: the
    // largest of all logits, which are numbers.
    KCCL_DEVICE Sampler(Worker<S>& worker, uint32_t position, float peak)
        : worker_(worker),
          rules_(worker.task().sampling),
          position_(position),
          exchange_(mem::load_plain(&worker.shared().exchanges)),
          is_random_(worker.task().sampling.temperature > 0),
          peak_(double{peak}) {}

    // False: a wait failed.
    KCCL_DEVICE bool choose(Chosen* chosen) {
        const uint32_t top_k = is_random_ ? rules_.top_k : 0;
        const uint32_t k = top_k == 0 || top_k > S::kVocab ? S::kVocab : top_k;
        const double top_p = is_random_ ? rules_.top_p : 1, min_p = is_random_ ? rules_.min_p : 0;
        const bool needs_sums = k < S::kVocab || top_p < 1 || rules_.wants_logprobs != 0;
        // Bounds of the k-th largest score, and of the weight of all that are not below it. Scores
        // below `low` weigh nothing.
        double low = 0, high = 0;
        uint64_t least = kOne, most = 0;  // 0: not known
        for (bool is_kept = false; !is_kept;) {
            look();
            if (!worker_.meet()) return false;
            send();
            if (!receive()) return false;
            if (is_first_) {
                is_first_ = false;
                take(found_candidate(kBest));
                high = largest_ = found_candidate(kBelow).key;
                low = high - kSpan;
                pivot_ = k == S::kVocab ? kLowest : low + (high - low) / 2;
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
                // The k-th largest score is `low`. Or it lies so low that what is left of top_k's
                // weighs nothing.
                if (most == 0) most = least;
                least = most;
            }
            const auto weight = static_cast<double>(before.weight);
            const bool is_out =
                before.num >= k || share_of_x() < min_p ||
                (top_p < 1 && most != 0 && weight >= top_p * static_cast<double>(most));
            is_kept = !is_out && (!(top_p < 1) || weight < top_p * static_cast<double>(least));
            if (is_out) take(found_candidate(kBest));
            if (least != most) {
                pivot_ = low + (high - low) / 2;
                if (!(pivot_ > low)) pivot_ = high;
            }
        }
        chosen->id = x_.id;
        if (rules_.wants_logprobs != 0) {
            const double sum = static_cast<double>(found_tally(kAll).weight) / kOne;
            chosen->logprob = static_cast<float>(double{x_.logit} - peak_ - logarithm(sum));
        }
        return true;
    }

  private:
    using Head = typename Shape<S>::Head;
    // The weight of the largest score. That of kSpan less is 0, rounded.
    static constexpr uint64_t kOne = uint64_t{1} << 44;
    static constexpr double kSpan = 32;
    static constexpr double kLowest = -1.7976931348623157e308;
    static_assert(S::kVocab <= 1u << 19, "all weights together have 64 bits");

    // Looks at this thread's share of the block's logits, and leaves what its warp has found.
    KCCL_DEVICE void look() {
        Candidate best = {0, 0, -1, false}, below = best, reached = best;
        Tally before = {0, 0}, from_pivot = {0, 0}, all = {0, 0};
        const Cut tiles = Shape<S>::head_tiles_of(worker_.block());
        const uint32_t first_quad = Shape<S>::first_head_row_of(worker_.comm().rank) / 4;
        const uint32_t end = (tiles.first + tiles.num) * kTileQuads;
#pragma unroll 1
        for (uint32_t quad = tiles.first * kTileQuads + own_thread(); quad < end;
             quad += Shape<S>::kConsumers) {
            const Quad logits = load_quad(worker_.task().own_logits, quad);
            const uint32_t seen = seen_of(quad);
            Philox words = {};
            if (is_random_) words = philox(rules_.seed, first_quad + quad, position_);
            // Four at a time would be faster here, but take registers from the ops.
#pragma unroll 1
            for (uint32_t i = 0; i < 4; ++i) {
                const auto id = static_cast<int32_t>((first_quad + quad) * 4 + i);
                const float logit = logits.value[i];
                const bool is_seen = (seen >> i & 1u) != 0;
                const double score = score_of(logit, is_seen);
                const bool is_larger = is_first_ || score > x_score_;
                const uint64_t weight = is_first_ ? 0 : weight_of(score - largest_);
                if (is_larger || (score == x_score_ && id < x_.id)) {
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
                if (!is_first_ && rules_.wants_logprobs != 0) {
                    all.weight += weight_of(double{logit} - peak_);
                }
            }
        }
        Note notes[kNumNotes] = {note_of(best),   note_of(below),      note_of(reached),
                                 note_of(before), note_of(from_pivot), note_of(all)};
        combine_in_warp(0, notes);
        if (!leads(warp())) return;
        KCCL_UNROLL
        for (uint32_t kind = 0; kind < kNumNotes; ++kind) {
            mem::store_plain(&worker_.shared().notes[worker_.warp_index()][kind], notes[kind]);
        }
    }

    // Tells all blocks what this one has found. All warps have met since they looked.
    KCCL_DEVICE void send() {
        Shared<S>& shared = worker_.shared();
#pragma unroll 1
        for (uint32_t kind = worker_.warp_index(); kind < kNumNotes; kind += S::kWarps) {
            const uint32_t from = worker_.thread();
            Note note[1] = {};
            if (from < S::kWarps) note[0] = mem::load_plain(&shared.notes[from][kind]);
            combine_in_warp(kind, note);
            if (!leads(warp())) continue;
            const uint32_t mine = worker_.comm().rank * S::kBlocks + worker_.block();
            worker_.publish_to_all(Places<S>::note(exchange_, kind) + mine, quad_of(note[0]),
                                   tag_of_end(exchange_));
        }
        if (worker_.warp_index() == 0 && leads(warp())) {
            mem::store_plain(&shared.exchanges, exchange_ + 1);
        }
    }

    KCCL_DEVICE uint32_t own_thread() const {
        return worker_.warp_index() * platform::kWarpSize + worker_.thread();
    }

    // A bit for each id of quad `quad` of this rank: whether the text has it. 0 without a penalty.
    KCCL_DEVICE uint32_t seen_of(uint32_t quad) const {
        const Task& task = worker_.task();
        if (task.marks == 0) return 0;
        const Quad marks = load_quad(task.marks, quad);
        uint32_t seen = 0;
        KCCL_UNROLL
        for (int i = 0; i < 4; ++i) {
            const bool is_seen = platform::bit_cast<uint32_t>(marks.value[i]) == task.number;
            seen |= is_seen ? 1u << i : 0;
        }
        return seen;
    }

    KCCL_DEVICE double score_of(float logit, bool is_seen) const {
        double score = double{logit};
        if (is_seen) {
            const double penalty = rules_.repetition_penalty;
            score = score > 0 ? score / penalty : score * penalty;
        }
        return is_random_ ? score / rules_.temperature : score;
    }

    KCCL_DEVICE static uint64_t weight_of(double below_peak) {
        return static_cast<uint64_t>(exponential(below_peak) * kOne + 0.5);
    }

    // How likely x is, in relation to the most likely id.
    KCCL_DEVICE double share_of_x() const { return exponential(x_score_ - largest_); }

    KCCL_DEVICE void take(const Candidate& candidate) {
        x_ = candidate;
        x_score_ = score_of(candidate.logit, candidate.is_seen);
    }

    // Waits for the notes of all blocks, and leaves in shared memory what they say together. False:
    // a wait failed.
    KCCL_DEVICE bool receive() {
        constexpr uint32_t kBlocks = S::kWorldSize * S::kBlocks;
        constexpr uint32_t kEach = ceil_div(kBlocks, platform::kWarpSize);
        constexpr uint32_t kAtOnce = kEach < 2 ? kEach : 2;
#pragma unroll 1
        for (uint32_t kind = worker_.warp_index(); kind < kNumNotes; kind += S::kWarps) {
            Note all[1] = {};
#pragma unroll 1
            for (uint32_t first = 0; first < kBlocks; first += kAtOnce * platform::kWarpSize) {
                uint32_t places[kAtOnce], wanted = 0;
                Quad quads[kAtOnce];
                KCCL_UNROLL
                for (uint32_t i = 0; i < kAtOnce; ++i) {
                    const uint32_t from = first + i * platform::kWarpSize + worker_.thread();
                    wanted |= from < kBlocks ? 1u << i : 0;
                    places[i] = Places<S>::note(exchange_, kind) + (from < kBlocks ? from : 0);
                }
                worker_.template await<Worker<S>::kReach>(places, wanted, tag_of_end(exchange_),
                                                          quads, (1u << S::kWorldSize) - 1);
                KCCL_UNROLL
                for (uint32_t i = 0; i < kAtOnce; ++i) {
                    if ((wanted >> i & 1u) != 0) all[0] = combined(kind, all[0], note_of(quads[i]));
                }
            }
            combine_in_warp(kind, all);
            if (leads(warp())) mem::store_plain(&worker_.shared().found[kind], all[0]);
        }
        ++exchange_;
        return worker_.meet();
    }

    KCCL_DEVICE Candidate found_candidate(NoteKind kind) const {
        return candidate_of(mem::load_plain(&worker_.shared().found[kind]));
    }
    KCCL_DEVICE Tally found_tally(NoteKind kind) const {
        return tally_of(mem::load_plain(&worker_.shared().found[kind]));
    }

    Worker<S>& worker_;
    const Sampling& rules_;
    const uint32_t position_;
    uint32_t exchange_;
    const bool is_random_;
    const double peak_;
    bool is_first_ = true;
    double largest_ = 0;
    double pivot_ = 0;
    Candidate x_ = {0, 0, -1, false};
    double x_score_ = 0;
};

// Marks an id that the text has, if it is one of this block's rows.
template <class S>
KCCL_DEVICE void mark(const Worker<S>& worker, int32_t id) {
    const Cut tiles = Shape<S>::head_tiles_of(worker.block());
    const uint32_t row =
        static_cast<uint32_t>(id) - Shape<S>::first_head_row_of(worker.comm().rank);
    const Task& task = worker.task();
    const bool is_here = row - tiles.first * kTileRows < tiles.num * kTileRows;
    if (!is_here || task.marks == 0) return;
    mem::store<mem::Order::kRelaxed, mem::Scope::kBlock>(
        reinterpret_cast<uint32_t*>(task.marks) + row, task.number);
}

// Marks those that the request begins with.
template <class S>
KCCL_DEVICE void mark_ids(const Worker<S>& worker) {
    const Task& task = worker.task();
    const auto* const ids = reinterpret_cast<const int32_t*>(task.ids);
    const uint32_t first = worker.warp_index() * platform::kWarpSize + worker.thread();
    for (uint32_t i = first; i < task.num_ids; i += Shape<S>::kConsumers) {
        mark(worker, mem::load_plain(ids + i));
    }
}

}  // namespace kccl::decode
