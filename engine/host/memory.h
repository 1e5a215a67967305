// Memory of one rank that its blocks (threads) share, outside the window that other ranks access.
// Nothing is overwritten too early, because all blocks of the rank wait for each other at least six
// times a layer, and so between two ops that write the same buffer.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <memory>

#include "layout.h"
#include "team.h"

namespace kccl::engine {

struct Free {
    void operator()(void* memory) const { std::free(memory); }
};
template <class T>
using Array = std::unique_ptr<T[], Free>;
using Floats = Array<float>;

// Returns an array of zeros, whose length is the product of the factors, or null if there is no
// memory. Large arrays come as fresh pages, which take no memory before they are written.
template <class T = float, class... Factors>
Array<T> zeros(Factors... factors) {
    uint64_t count = 1;
    bool is_too_large = false;
    ((is_too_large |= __builtin_mul_overflow(count, static_cast<uint64_t>(factors), &count)), ...);
    if (is_too_large) return nullptr;
    return Array<T>(static_cast<T*>(std::calloc(count != 0 ? count : 1, sizeof(T))));
}

// Asks the kernel for huge pages, because reading through them needs fewer address translations. If
// it gives none, only speed is lost.
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
          ffn_stride(padded(model.ffn) * std::max(model.num_chosen, 1u)),
          hidden_stride(padded(model.hidden)),
          routed_stride(padded(model.num_experts)),
          key_stride(uint64_t{padded(model.context)} * model.head_dim),
          value_stride(uint64_t{padded(model.context)} * padded(model.head_dim)),
          num_kv(uint64_t{num_lanes} * model.kv_heads),
          num_residuals(model.num_residuals == 1 ? 1 : num_lanes),
          num_layers(model.num_layers),
          qkv(zeros(kColumns, num_lanes, qkv_stride)),
          attended(zeros(kColumns, num_lanes, attended_stride)),
          activated(zeros(kColumns, num_lanes, ffn_stride)),
          own(zeros(kColumns, num_lanes, hidden_stride)),
          routed(zeros(kColumns, routed_stride)),
          residuals(zeros(num_residuals, kColumns, hidden_stride)),
          normed(zeros(num_residuals, kColumns, hidden_stride)),
          keys(zeros(model.num_slots, model.num_layers, num_kv, key_stride)),
          values(zeros(model.num_slots, model.num_layers, num_kv, value_stride)) {
        prefer_huge_pages(keys, model.num_slots * model.num_layers * num_kv * key_stride);
        prefer_huge_pages(values, model.num_slots * model.num_layers * num_kv * value_stride);
    }

    bool is_complete() const {
        return qkv && attended && activated && own && routed && residuals && normed && keys &&
               values;
    }
    // keys_of() and values_of() return the addresses of a KV head's keys and values in a slot. kv:
    // the number of the KV head, over this rank's lanes.
    float* keys_of(uint32_t the_slot, uint32_t layer, uint64_t kv) const {
        return keys.get() + vector_of(the_slot, layer, kv) * key_stride;
    }
    float* values_of(uint32_t the_slot, uint32_t layer, uint64_t kv) const {
        return values.get() + vector_of(the_slot, layer, kv) * value_stride;
    }

    // Copies the first positions of a slot of the KV cache into another slot. share: which layers
    // and KV heads, of all num_layers * num_kv.
    void copy(const Copy& copy, uint32_t head_dim, Share share) const {
        if (copy.to == copy.from) return;
        for (uint32_t i = share.first; i < share.end; ++i) {
            const uint32_t layer = i / static_cast<uint32_t>(num_kv);
            const uint64_t kv = i % num_kv;
            std::copy_n(keys_of(copy.from, layer, kv), uint64_t{padded(copy.num)} * head_dim,
                        keys_of(copy.to, layer, kv));
            std::copy_n(values_of(copy.from, layer, kv), uint64_t{copy.num} * padded(head_dim),
                        values_of(copy.to, layer, kv));
        }
    }

    const uint64_t qkv_stride, attended_stride, ffn_stride, hidden_stride, routed_stride;
    const uint64_t key_stride, value_stride, num_kv;
    const uint32_t num_residuals, num_layers;
    // These lie as [lane][column][stride], unless a comment says otherwise. A column is a position
    // of the run.
    const Floats qkv;        // queries, keys, values
    const Floats attended;   // output of attention
    const Floats activated;  // output of the MLP's first half, or that of each chosen expert
    const Floats own;        // a module's output, before it is rounded for a message
    const Floats routed;     // [column][stride]: the router's logits, before biases are added
    // [residual][column][stride]. Runs of several columns use these; see Pass::is_alone().
    const Floats residuals;
    const Floats normed;
    // [slot][layer][lane and KV head][...]: compute.h says how the keys and values of a head lie.
    const Floats keys;
    const Floats values;
    uint32_t slot = 0;  // that of the request that runs alone

  private:
    uint64_t vector_of(uint32_t the_slot, uint32_t layer, uint64_t kv) const {
        return (uint64_t{the_slot} * num_layers + layer) * num_kv + kv;
    }
};

}  // namespace kccl::engine
