// Memory of one rank that its blocks share, outside the window. Why nothing is overwritten too
// early: between two ops that write the same buffer all blocks of the rank wait for each other, in
// every layer four times.
#pragma once

#include <cstdlib>
#include <memory>

#include "layout.h"

namespace kccl::engine {

struct Free {
    void operator()(float* memory) const { std::free(memory); }
};
using Floats = std::unique_ptr<float[], Free>;

// Zeros, which cost no memory before they are written.
inline Floats zeros(uint64_t count) {
    const uint64_t bytes = aligned(count * sizeof(float) + 1);
    void* memory = nullptr;
    // Large ones come as fresh pages: zero, and untouched.
    memory = std::calloc(1, bytes + 64);
    return Floats(static_cast<float*>(memory));
}

struct RankMemory {
    RankMemory(const KcclEngineModel& model, uint32_t num_lanes)
        : qkv_stride(padded((model.heads + 2 * model.kv_heads) * model.head_dim)),
          attended_stride(padded(model.heads * model.head_dim)),
          ffn_stride(padded(model.ffn)),
          hidden_stride(padded(model.hidden)),
          key_stride(uint64_t{padded(model.context)} * model.head_dim),
          value_stride(uint64_t{padded(model.context)} * padded(model.head_dim)),
          num_kv(uint64_t{num_lanes} * model.kv_heads),
          qkv(zeros(uint64_t{kColumns} * num_lanes * qkv_stride)),
          attended(zeros(uint64_t{kColumns} * num_lanes * attended_stride)),
          activated(zeros(uint64_t{kColumns} * num_lanes * ffn_stride)),
          own(zeros(uint64_t{kColumns} * num_lanes * hidden_stride)),
          keys(zeros(model.num_layers * num_kv * key_stride)),
          values(zeros(model.num_layers * num_kv * value_stride)) {}

    bool is_complete() const { return qkv && attended && activated && own && keys && values; }
    float* keys_of(uint32_t layer, uint64_t kv) const {
        return keys.get() + (layer * num_kv + kv) * key_stride;
    }
    float* values_of(uint32_t layer, uint64_t kv) const {
        return values.get() + (layer * num_kv + kv) * value_stride;
    }

    const uint64_t qkv_stride, attended_stride, ffn_stride, hidden_stride;
    const uint64_t key_stride, value_stride, num_kv;
    // All [lane][column][stride].
    const Floats qkv;        // queries, keys, values
    const Floats attended;   // what attention gives
    const Floats activated;  // what the MLP's first half gives
    const Floats own;        // a module's output, unrounded
    // [layer][lane and KV head]: compute.h.
    const Floats keys;
    const Floats values;
};

}  // namespace kccl::engine
