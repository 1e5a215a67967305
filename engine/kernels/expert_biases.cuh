// Adds the biases of the chosen experts. Which they are is known behind the router. Then a warp of
// its own copies those of the block's rows into shared memory, where no op waits for them.
#pragma once

#include "biases.cuh"

namespace kccl::decode {

// Returns which float4 of Task.biases has those of an expert's rows 0 to 3. M: the product's
// matrix.
template <class M, class S>
KCCL_DECODE uint64_t biases_of_expert(Product<S> product, uint32_t layer, uint32_t expert) {
    return Biases<S>::at(product, layer, 0) + uint64_t{expert} * M::One::kTiles * kTileFloat4s;
}

// Runs the warp that copies the biases of the chosen experts for the block's rows, layer by layer.
// No consumer warp does: the 19 copies of gpt-oss would take it some 900 instructions, while the
// others multiply already. Returns when the consumer warps have ended. Called by all threads of the
// warp.
template <class S>
KCCL_DECODE void copy_expert_biases(const Task& task, Shared<S>& shared) {
    using GateUp = typename Shape<S>::ExpertGateUp;
    using Down = typename Shape<S>::ExpertDown;
    static_assert(kHasExpertBiases<S>, "there are biases");
    if (task.only_reads != 0) return;
    const auto* const biases = reinterpret_cast<const Float4*>(task.biases);
    // Values that follow from the block's number are this warp's own. Otherwise the producer warp,
    // which has few registers, would keep them too.
    const uint32_t block =
        Shape<S>::block_in_group_of(mem::forget_index(platform::block_in_grid()));
    const Cut of_gate_up = GateUp::tiles_of(block), of_down = Down::tiles_of(block);
    const uint32_t num = (of_gate_up.num + of_down.num * S::kPlaces) * kTileFloat4s;
    uint32_t parity = 0;
    for (uint32_t layer = 0;; layer = layer + 1 < S::kNumLayers ? layer + 1 : 0) {
        // All consumer warps have met since they read the last layer's biases.
        while (platform::warp_any(!mem::has_completed(&shared.has_chosen, parity))) {
            if (platform::warp_any(mem::has_completed_now(&shared.ended, 0))) return;
            mem::poll_pause();
        }
        parity ^= 1u;
#pragma unroll 1
        for (uint32_t index4 = warp().index(); index4 < num; index4 += platform::kWarpSize) {
            const uint32_t i = index4 / kTileFloat4s, in_tile = index4 % kTileFloat4s;
            if (i < of_gate_up.num) {
                const uint32_t tile = of_gate_up.first + i;
                const uint32_t expert =
                    mem::load_plain(&shared.choice.expert[GateUp::place_of(tile)]);
                const uint64_t first =
                    biases_of_expert<GateUp, S>(Product<S>::kExpertGateUp, layer, expert) +
                    GateUp::tile_of_one(tile) * kTileFloat4s;
                mem::store_plain(shared.of_gate_up + index4,
                                 mem::load_plain(biases + first + in_tile));
            } else {
                const uint32_t place = (i - of_gate_up.num) / of_down.num;
                const uint32_t tile = (i - of_gate_up.num) % of_down.num;
                const uint32_t expert = mem::load_plain(&shared.choice.expert[place]);
                const uint64_t first =
                    biases_of_expert<Down, S>(Product<S>::kExpertDown, layer, expert) +
                    (of_down.first + tile) * kTileFloat4s;
                mem::store_plain(&shared.of_down[place][tile * kTileFloat4s + in_tile],
                                 mem::load_plain(biases + first + in_tile));
            }
        }
        warp().sync();
        if (leads(warp())) mem::arrive(&shared.have_biases);
    }
}

// Waits for the biases of a layer's chosen experts. The wait ends: warp 0 chooses even if its own
// wait for the logits has failed. Called by all consumer warps, before the first of them is added.
template <class S>
KCCL_DECODE void await_expert_biases(ConsumerWarp<S>& consumer, uint32_t layer) {
    if constexpr (kHasExpertBiases<S>) {
        const uint32_t steps = consumer.token_step() - consumer.task().token_step;
        const uint32_t parity = (steps * S::kNumLayers + layer) & 1u;
        const mem::CopyBarrier* const have_biases = &consumer.shared().have_biases;
        while (platform::warp_any(!mem::has_completed(have_biases, parity))) mem::poll_pause();
    }
}

// Returns the sums of four rows of a row tile of ExpertGateUp times `factor`, plus the biases of
// these rows if the product has any. i: the number of the float4 within the tile.
template <class S>
KCCL_DECODE Float4 scaled_by_expert(ConsumerWarp<S>& consumer, uint32_t tile, uint32_t i,
                                    Float4 sums, float factor) {
    using M = typename Shape<S>::ExpertGateUp;
    KCCL_UNROLL
    for (float& value : sums.value) value = rounded_product(value, factor);
    if constexpr (kHasExpertBiases<S>) {
        const uint32_t first = M::tiles_of(consumer.block_in_group()).first;
        const Float4 bias =
            mem::load_plain(consumer.shared().of_gate_up + (tile - first) * kTileFloat4s + i);
        KCCL_UNROLL
        for (int j = 0; j < 4; ++j) sums.value[j] += bias.value[j];
    }
    return sums;
}

// Returns `total`, the sum over all lanes for float4 `index4` of the residual, plus the biases of
// the module's last product if it has any: with experts, each bias times the expert's share.
template <class S>
KCCL_DECODE Float4 plus_module_biases(ConsumerWarp<S>& consumer, uint32_t module, uint32_t index4,
                                      Float4 total) {
    if constexpr (S::kHasExperts) {
        using M = typename Shape<S>::ExpertDown;
        constexpr Product<S> kProduct = Product<S>::kExpertDown;
        if (last_of_module<S>(module % S::kNumModules) == kProduct) {
            if constexpr (kHasExpertBiases<S>) {
                const uint32_t first = M::tiles_of(consumer.block_in_group()).first * kTileFloat4s;
                Float4 biases = {};
                KCCL_UNROLL
                for (uint32_t place = 0; place < S::kPlaces; ++place) {
                    const auto& shared = consumer.shared();
                    const float share = mem::load_plain(&shared.choice.share[place]);
                    const Float4 bias = mem::load_plain(&shared.of_down[place][index4 - first]);
                    KCCL_UNROLL
                    for (int i = 0; i < 4; ++i) {
                        biases.value[i] += rounded_product(share, bias.value[i]);
                    }
                }
                KCCL_UNROLL
                for (int i = 0; i < 4; ++i) total.value[i] += biases.value[i];
            }
            return total;
        }
    }
    return plus_biases<S>(consumer.task(), module, index4, total);
}

}  // namespace kccl::decode
