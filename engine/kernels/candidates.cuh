// Data that blocks exchange while they choose a token: ids that may become the token, and sums over
// ids. Both travel as control words (exchange_buffer.cuh).
#pragma once

#include "head.cuh"

namespace kccl::decode {

// An id that may become the token. Candidates are compared by `key`, the id's score plus noise.
// Where only scores are compared, `key` is the score or its negative, and the id is 0.
struct Candidate {
    double key;
    float logit;
    int32_t id;  // -1: none
    bool is_seen;
};

KCCL_DECODE Candidate better(const Candidate& a, const Candidate& b) {
    const bool takes_b =
        b.id >= 0 && (a.id < 0 || b.key > a.key || (b.key == a.key && b.id < a.id));
    return takes_b ? b : a;
}

// The sum of the weights of some ids, and the number of ids (combined() says which).
struct Tally {
    uint64_t weight;
    uint32_t num;
};

// Packs a candidate or a tally into a control word. The functions below this one unpack them. A
// control word of zeros means no candidate, and an empty tally.
KCCL_DECODE ControlWord control_word_of(const Candidate& candidate) {
    const auto key = platform::bit_cast<uint64_t>(candidate.key);
    return {{static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32),
             platform::bit_cast<uint32_t>(candidate.logit)},
            static_cast<uint32_t>(candidate.id + 1) << 1 | (candidate.is_seen ? 1u : 0)};
}

KCCL_DECODE Candidate candidate_of(const ControlWord& control) {
    return {platform::bit_cast<double>(control.word[0] | uint64_t{control.word[1]} << 32),
            platform::bit_cast<float>(control.word[2]),
            static_cast<int32_t>(control.small >> 1) - 1, (control.small & 1u) != 0};
}

KCCL_DECODE ControlWord control_word_of(const Tally& tally) {
    return {
        {static_cast<uint32_t>(tally.weight), static_cast<uint32_t>(tally.weight >> 32), tally.num},
        0};
}

KCCL_DECODE Tally tally_of(const ControlWord& control) {
    return {control.word[0] | uint64_t{control.word[1]} << 32, control.word[2]};
}

// Combines two control words of the same kind (ControlWordKind): of two candidates it returns the
// better one, of two tallies the sum. x is the id that is asked about, and the pivot is a score
// with which scores are compared: see sample.cuh. The first exchange of a choice has neither.
//
//   kBest       candidate: the best id before x in the order; in the first exchange, of all ids
//   kBelow      candidate: the largest score below the pivot; in the first exchange, of all scores
//   kReached    candidate: the smallest score not below the pivot. Its key is the negated score
//   kBefore     tally: the weight of the ids before x, and the number of those with larger scores
//   kFromPivot  tally: the ids whose scores are not below the pivot
//   kAll        tally: the weight of all ids by their logits, for log-probabilities
KCCL_DECODE ControlWord combined(uint32_t kind, const ControlWord& a, const ControlWord& b) {
    if (kind < kBefore) return control_word_of(better(candidate_of(a), candidate_of(b)));
    const Tally one = tally_of(a), other = tally_of(b);
    return control_word_of(Tally{one.weight + other.weight, one.num + other.num});
}

// Replaces control_words[i], whose kind is first_kind + i, by the combination of those of all
// threads of the warp. Called by all of them.
template <uint32_t N>
KCCL_DECODE void combine_in_warp(uint32_t first_kind, ControlWord (&control_words)[N]) {
#pragma unroll 1
    for (uint32_t step = platform::kWarpSize / 2; step > 0; step /= 2) {
        KCCL_UNROLL
        for (uint32_t i = 0; i < N; ++i) {
            const ControlWord other = platform::shuffle(control_words[i], warp().index() ^ step);
            control_words[i] = combined(first_kind + i, control_words[i], other);
        }
    }
}

}  // namespace kccl::decode
