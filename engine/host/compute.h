// What a block computes, as a table of functions for each instruction set: products (multiply.h),
// attention (attention.h), and everything between them (elementwise.h). The order of every sum is
// written down, so that results are the same bits whatever the instruction set.
#pragma once

#include "products.h"

namespace kccl::engine {

// Keys of one KV head lie as float [position / 16][element][16], so that a register holds 16
// positions; values as float [position][padded(head_dim)].
constexpr uint32_t kKeyBlock = 16;

inline uint32_t padded(uint32_t n) { return (n + 15) / 16 * 16; }

// Queries that attend() takes at a time, at most.
constexpr int kQueries = 4;

// What queries of one KV head attend to.
struct Keys {
    const float* keys;
    const float* values;
    uint32_t head_dim;
    float scale;
    uint64_t scores_stride;  // between the scores of two queries
};

// A query, and the positions that it sees: [first, end), the last of them its own.
struct Query {
    const float* query;
    float* out;  // float [head_dim]
    uint32_t first;
    uint32_t end;
};

struct Peak {
    float value;
    uint32_t index;  // of the first, if several are equal
    bool has_nan;
};

struct Compute {
    const char* name;
    Multiply multiply;
    Touch touch;
    // out = x / sqrt(mean(x^2) + eps) * weight.
    void (*rms_norm)(const float* x, const float* weight, uint32_t n, float eps, float* out);
    // Softmax attention of at most kQueries queries. scores: float [query][scores_stride], of which
    // those up to padded(end) are overwritten.
    void (*attend)(const Query* queries, int num_queries, const Keys& keys, float* scores);
    // Turns pairs (2i, 2i + 1) by the angles of one position.
    void (*rotate)(float* x, const float* cosines, const float* sines, uint32_t head_dim);
    // out = gate / (1 + exp(-gate)) * up.
    void (*swiglu)(const float* gate, const float* up, uint32_t n, float* out);
    // x += scale * y.
    void (*add_scaled)(float* x, const float* y, float scale, uint32_t n);
    // x += the sum of the arrays, which are added up from left to right; at least one.
    void (*add_sum)(float* x, const float* const* arrays, int num_arrays, uint32_t n);
    void (*add_sum_of_bf16)(float* x, const uint16_t* const* arrays, int num_arrays, uint32_t n);
    // out = the sum of the arrays / num_arrays.
    void (*mean)(float* out, const float* const* arrays, int num_arrays, uint32_t n);
    // Rounds to BF16, to nearest, ties to even.
    void (*round_to_bf16)(const float* x, uint32_t n, uint16_t* out);
    // The largest of n values, at least one.
    Peak (*peak)(const float* x, uint32_t n);
};

// The functions for the CPU that this runs on.
const Compute& compute();

}  // namespace kccl::engine
