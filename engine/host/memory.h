// Memory of one rank that its blocks share, outside the window. Why nothing is overwritten too
// early: between two ops that write the same buffer all blocks of the rank wait for each other, at
// least six times a layer.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <memory>

#include "layout.h"

namespace kccl::engine {

struct Free {
    void operator()(void* memory) const { std::free(memory); }
};
template <class T>
using Array = std::unique_ptr<T[], Free>;
using Floats = Array<float>;

// As many zeros as the product of the factors; null if there is no memory for them. Large arrays
// come as fresh pages, which cost no memory before they are written.
template <class T = float, class... Factors>
Array<T> zeros(Factors... factors) {
    uint64_t count = 1;
    bool is_too_large = false;
    ((is_too_large |= __builtin_mul_overflow(count, static_cast<uint64_t>(factors), &count)), ...);
    if (is_too_large) return nullptr;
    return Array<T>(static_cast<T*>(std::calloc(count != 0 ? count : 1, sizeof(T))));
}

// Asks for huge pages: streaming through them looks up fewer translations. Only speed is lost where
// there are none.
template <class T>
void prefer_huge_pages(const Array<T>& array, uint64_t count) {
    const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
    const uint64_t begin = reinterpret_cast<uint64_t>(array.get());
    const uint64_t first = (begin + page - 1) / page * page;
    const uint64_t last = (begin + count * sizeof(T)) / page * page;
    if (array && first < last) {
        (void)madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
    }
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
          num_residuals(model.num_residuals == 1 ? 1 : num_lanes),
          qkv(zeros(kColumns, num_lanes, qkv_stride)),
          attended(zeros(kColumns, num_lanes, attended_stride)),
          activated(zeros(kColumns, num_lanes, ffn_stride)),
          own(zeros(kColumns, num_lanes, hidden_stride)),
          residuals(zeros(num_residuals, kColumns, hidden_stride)),
          normed(zeros(num_residuals, kColumns, hidden_stride)),
          keys(zeros(model.num_layers, num_kv, key_stride)),
          values(zeros(model.num_layers, num_kv, value_stride)) {
        prefer_huge_pages(keys, model.num_layers * num_kv * key_stride);
        prefer_huge_pages(values, model.num_layers * num_kv * value_stride);
    }

    bool is_complete() const {
        return qkv && attended && activated && own && residuals && normed && keys && values;
    }
    float* keys_of(uint32_t layer, uint64_t kv) const {
        return keys.get() + (layer * num_kv + kv) * key_stride;
    }
    float* values_of(uint32_t layer, uint64_t kv) const {
        return values.get() + (layer * num_kv + kv) * value_stride;
    }

    const uint64_t qkv_stride, attended_stride, ffn_stride, hidden_stride;
    const uint64_t key_stride, value_stride, num_kv;
    const uint32_t num_residuals;
    // All [lane][column][stride].
    const Floats qkv;        // queries, keys, values
    const Floats attended;   // what attention gives
    const Floats activated;  // what the MLP's first half gives
    const Floats own;        // a module's output, unrounded
    // [residual][column][stride], for runs of several columns: pass.h.
    const Floats residuals;
    const Floats normed;
    // [layer][lane and KV head]: compute.h.
    const Floats keys;
    const Floats values;
};

}  // namespace kccl::engine
