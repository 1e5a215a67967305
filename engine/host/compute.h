// Declares what a block (a thread of the host executor) computes, as a table of functions for each
// instruction set: products (multiply.h), attention (attention.h), and everything between them
// (elementwise.h). The order of every sum is fixed, so that results have the same bits with every
// instruction set.
#pragma once

#include "products.h"

namespace kccl::engine {

// Keys of one KV head lie as float [position / 16][element][16], so that a register holds 16
// positions. Values lie as float [position][padded(head_dim)].
constexpr uint32_t kKeyBlock = 16;

inline uint32_t padded(uint32_t n) { return (n + 15) / 16 * 16; }

// How many queries attend() takes at a time, at most.
constexpr int kQueries = 4;

// The keys and values of one KV head, to which its queries attend.
struct Keys {
    const float* keys;
    const float* values;
    uint32_t head_dim;
    float scale;
    uint64_t scores_stride;  // how many floats lie between the first scores of two queries
};

// A query, and the positions [first, end) that it sees. The last of them is its own.
struct Query {
    const float* query;
    float* out;  // float [head_dim]
    uint32_t first;
    uint32_t end;
    float sink;  // a score that joins the softmax but has no value; minus infinity: none
};

struct Peak {
    float value;
    uint32_t index;  // of the largest value; the lowest, if several are equal
    bool has_nan;
};

struct Compute {
    const char* name;
    Multiply multiply[kNumFormats];
    Prepare prepare[kNumFormats];  // null if the format multiplies activations as they are
    Touch touch;
    // out = x / sqrt(mean(x^2) + eps) * weight.
    void (*rms_norm)(const float* x, const float* weight, uint32_t n, float eps, float* out);
    // Computes softmax attention of at most kQueries queries. scores: float [query][scores_stride],
    // memory that this overwrites up to padded(end).
    void (*attend)(const Query* queries, int num_queries, const Keys& keys, float* scores);
    // Rotates the pairs (2i, 2i + 1) of a head by the angles of one position (RoPE).
    void (*rotate)(float* x, const float* cosines, const float* sines, uint32_t head_dim);
    // out = gate / (1 + exp(-gate)) * up.
    void (*swiglu)(const float* gate, const float* up, uint32_t n, float* out);
    // out = g / (1 + exp(-1.702 g)) * (u + 1). g is the gate, but at most `limit`. u is "up",
    // bounded to -limit and limit.
    void (*swiglu_limited)(const float* gate, const float* up, float limit, uint32_t n, float* out);
    // x = exp(x - most), where no element is above `most`.
    void (*powers)(float* x, float most, uint32_t n);
    // x += scale * y.
    void (*add_scaled)(float* x, const float* y, float scale, uint32_t n);
    // x += the sum of the arrays, of which there is at least one. They are added up from the first
    // to the last.
    void (*add_sum)(float* x, const float* const* arrays, int num_arrays, uint32_t n);
    void (*add_sum_of_bf16)(float* x, const uint16_t* const* arrays, int num_arrays, uint32_t n);
    // out = the sum of the arrays / num_arrays.
    void (*mean)(float* out, const float* const* arrays, int num_arrays, uint32_t n);
    // Rounds to BF16: to the nearest, ties to even.
    void (*round_to_bf16)(const float* x, uint32_t n, uint16_t* out);
    // Returns the largest of n values, n at least 1.
    Peak (*peak)(const float* x, uint32_t n);
};

// Returns the functions for the CPU that this runs on.
const Compute& compute();

}  // namespace kccl::engine
