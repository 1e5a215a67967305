// Computes softmax attention of a few queries to the keys and values of one KV head, for the
// instruction set that the compiler's flags name.
//
// Keys and values are read once for all queries. Each query has sums of its own, so that the CPU
// need not finish one addition before it begins the next. A sum is made in the order of the
// positions, so its bits do not depend on how many queries there are.
#pragma once

#include <algorithm>

#include "compute.h"
#include "vector16.h"

namespace kccl::engine {
namespace {

// How many sums, each a vector of 16 floats, fill half of the registers of AVX-512 or AVX2.
constexpr int kSums = kPerRegister == 16 ? 16 : 4;

// Computes the scores of BLOCKS blocks of keys from `block` on, a block being 16 positions.
// Positions that a query does not see get minus infinity. most[query]: the largest scores of the
// query so far, one for each of the 16 places in a block.
template <int QUERIES, int BLOCKS>
inline void score_blocks(const Query* queries, const Keys& k, uint32_t block, float* scores,
                         Floats16 (&most)[QUERIES]) {
    static constexpr int32_t kPlaces[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const uint64_t stride = uint64_t{k.head_dim} * kKeyBlock;
    const float* keys = k.keys + block * stride;
    Floats16 sums[QUERIES][BLOCKS];
    KCCL_ENGINE_UNROLL
    for (int q = 0; q < QUERIES; ++q) {
        KCCL_ENGINE_UNROLL
        for (int b = 0; b < BLOCKS; ++b) sums[q][b] = all(0.0f);
    }
    for (uint32_t i = 0; i < k.head_dim; ++i) {
        Floats16 elements[BLOCKS];
        KCCL_ENGINE_UNROLL
        for (int b = 0; b < BLOCKS; ++b) {
            elements[b] = load(keys + b * stride + uint64_t{i} * kKeyBlock);
        }
        KCCL_ENGINE_UNROLL
        for (int q = 0; q < QUERIES; ++q) {
            const Floats16 factor = all(queries[q].query[i]);
            KCCL_ENGINE_UNROLL
            for (int b = 0; b < BLOCKS; ++b) sums[q][b] = sums[q][b] + elements[b] * factor;
        }
    }
    const Ints16 places = load(kPlaces);
    KCCL_ENGINE_UNROLL
    for (int q = 0; q < QUERIES; ++q) {
        KCCL_ENGINE_UNROLL
        for (int b = 0; b < BLOCKS; ++b) {
            const auto base = static_cast<int32_t>((block + b) * kKeyBlock);
            const Ints16 position = places + all(base);
            const Ints16 is_seen =
                is_less(all(static_cast<int32_t>(queries[q].first) - 1), position) &
                is_less(position, all(static_cast<int32_t>(queries[q].end)));
            const Floats16 score =
                select(is_seen, sums[q][b] * all(k.scale), all(-__builtin_inff()));
            store(scores + q * k.scores_stride + base, score);
            most[q] = larger(most[q], score);
        }
    }
}

// Adds the values of positions [begin, end), times their weights, to each query's sums. These have
// VECTORS vectors of 16 elements, from element `first` of the head on.
template <int QUERIES, int VECTORS>
inline void add_positions(const Keys& k, const float* weights, uint32_t begin, uint32_t end,
                          uint32_t first, Floats16 (*sums)[VECTORS]) {
    const uint32_t stride = padded(k.head_dim);
    const float* value = k.values + uint64_t{begin} * stride + first;
    for (uint32_t p = begin; p < end; ++p, value += stride) {
        Floats16 elements[VECTORS];
        KCCL_ENGINE_UNROLL
        for (int v = 0; v < VECTORS; ++v) elements[v] = load(value + v * 16);
        KCCL_ENGINE_UNROLL
        for (int q = 0; q < QUERIES; ++q) {
            const Floats16 weight = all(weights[q * k.scores_stride + p]);
            KCCL_ENGINE_UNROLL
            for (int v = 0; v < VECTORS; ++v) sums[q][v] = sums[q][v] + elements[v] * weight;
        }
    }
}

// Computes VECTORS vectors of 16 elements of each query's output, from element `first` on. weights:
// the exponentials of the scores. scales: 1 / the sum of each query's weights.
template <int QUERIES, int VECTORS>
inline void add_values(const Query* queries, const Keys& k, const float* weights, uint32_t first,
                       const float* scales) {
    Floats16 sums[QUERIES][VECTORS];
    KCCL_ENGINE_UNROLL
    for (int q = 0; q < QUERIES; ++q) {
        KCCL_ENGINE_UNROLL
        for (int v = 0; v < VECTORS; ++v) sums[q][v] = all(0.0f);
    }
    // The positions that all queries see, [begin, end), lie between positions that only some of
    // them see. Those are added for each query alone.
    uint32_t begin = queries[0].first, end = queries[0].end;
    for (int q = 1; q < QUERIES; ++q) {
        begin = std::max(begin, queries[q].first);
        end = std::min(end, queries[q].end);
    }
    begin = std::min(begin, end);
    const auto add_alone = [&](int q, uint32_t from, uint32_t to) {
        add_positions<1, VECTORS>(k, weights + q * k.scores_stride, from, to, first, sums + q);
    };
    KCCL_ENGINE_UNROLL
    for (int q = 0; q < QUERIES; ++q) add_alone(q, queries[q].first, begin);
    add_positions<QUERIES, VECTORS>(k, weights, begin, end, first, sums);
    KCCL_ENGINE_UNROLL
    for (int q = 0; q < QUERIES; ++q) {
        add_alone(q, std::max(end, queries[q].first), queries[q].end);
        KCCL_ENGINE_UNROLL
        for (int v = 0; v < VECTORS; ++v) {
            const uint32_t at = first + v * 16, left = k.head_dim - at;
            store_some(queries[q].out + at, sums[q][v] * all(scales[q]), left < 16 ? left : 16);
        }
    }
}

template <int QUERIES>
void attend_together(const Query* queries, const Keys& k, float* scores) {
    constexpr int kBlocks = std::max(1, std::min(4, kSums / QUERIES));
    constexpr int kVectors = kBlocks;
    uint32_t first = queries[0].first, end = queries[0].end;
    for (int q = 1; q < QUERIES; ++q) {
        first = std::min(first, queries[q].first);
        end = std::max(end, queries[q].end);
    }
    const uint32_t first_block = first / kKeyBlock, end_block = (end + kKeyBlock - 1) / kKeyBlock;
    uint32_t block = first_block;
    Floats16 most[QUERIES];
    for (int q = 0; q < QUERIES; ++q) most[q] = all(-__builtin_inff());
    for (; block + kBlocks <= end_block; block += kBlocks) {
        score_blocks<QUERIES, kBlocks>(queries, k, block, scores, most);
    }
    for (; block < end_block; ++block) score_blocks<QUERIES, 1>(queries, k, block, scores, most);
    Floats16 peaks[QUERIES], sums[QUERIES];
    KCCL_ENGINE_UNROLL
    for (int q = 0; q < QUERIES; ++q) {
        peaks[q] = all(std::max(largest_of(most[q]), queries[q].sink));
        sums[q] = all(0.0f);
    }
    for (block = first_block; block < end_block; ++block) {
        KCCL_ENGINE_UNROLL
        for (int q = 0; q < QUERIES; ++q) {
            float* at = scores + q * k.scores_stride + uint64_t{block} * kKeyBlock;
            const Floats16 weight = exp_of<true>(load(at) - peaks[q]);
            store(at, weight);
            sums[q] = sums[q] + weight;
        }
    }
    float scales[QUERIES];
    for (int q = 0; q < QUERIES; ++q) {
        float of_sink[16];
        store(of_sink, exp_of<true>(all(queries[q].sink) - peaks[q]));
        scales[q] = 1.0f / (sum_of(sums[q]) + of_sink[0]);
    }
    uint32_t i = 0;
    const auto is_left = [&](int vectors) { return i + (vectors - 1) * 16 < k.head_dim; };
    for (; is_left(kVectors); i += kVectors * 16) {
        add_values<QUERIES, kVectors>(queries, k, scores, i, scales);
    }
    for (; kVectors > 2 && is_left(2); i += 32) {
        add_values<QUERIES, 2>(queries, k, scores, i, scales);
    }
    for (; is_left(1); i += 16) add_values<QUERIES, 1>(queries, k, scores, i, scales);
}

void attend(const Query* queries, int num_queries, const Keys& k, float* scores) {
    switch (num_queries) {
        case 1: return attend_together<1>(queries, k, scores);
        case 2: return attend_together<2>(queries, k, scores);
        case 3: return attend_together<3>(queries, k, scores);
        default: return attend_together<kQueries>(queries, k, scores);
    }
}

}  // namespace
}  // namespace kccl::engine
