// Adds the biases of the chosen experts. Which they are is known behind the router. Then warp 0
// copies those of the block's rows into shared memory, where no op waits for them.
#pragma once

#include "biases.cuh"

namespace kccl::decode {

// Returns which float4 of Task.biases has those of an expert's rows 0 to 3. M: the product's
// matrix.
template <class M, class S>
KCCL_DECODE uint64_t biases_of_expert(Product<S> product, uint32_t layer, uint32_t expert) {
    return Biases<S>::at(product, layer, 0) + uint64_t{expert} * M::One::kTiles * kTileFloat4s;
}

// Begins to copy the biases of the chosen experts for the block's rows. Called by all threads of
// warp 0, when the choice is written. All warps have met since they read the last layer's.
template <class S>
KCCL_DECODE void copy_expert_biases(ConsumerWarp<S>& consumer, uint32_t layer) {
    if constexpr (kHasExpertBiases<S>) {
        using GateUp = typename Shape<S>::ExpertGateUp;
        using Down = typename Shape<S>::ExpertDown;
        constexpr uint32_t kTileBytes = kTileFloat4s * sizeof(Float4);
        Shared<S>& shared = consumer.shared();
        const auto* const biases = reinterpret_cast<const Float4*>(consumer.task().biases);
        const Cut of_gate_up = GateUp::tiles_of(consumer.block_in_group());
        const Cut of_down = Down::tiles_of(consumer.block_in_group());
        if (leads(warp())) {
            mem::arrive_expecting(&shared.have_biases,
                                  (of_gate_up.num + of_down.num * S::kPlaces) * kTileBytes);
        }
        warp().sync();
        const auto copy = [&](Float4* to, uint64_t from) {
            mem::copy_async(to, biases + from, kTileBytes, &shared.have_biases, warp().index(),
                            warp().size());
        };
        for (uint32_t i = 0; i < of_gate_up.num; ++i) {
            const uint32_t tile = of_gate_up.first + i;
            const uint32_t expert = mem::load_plain(&shared.choice.expert[GateUp::place_of(tile)]);
            copy(shared.of_gate_up + i * kTileFloat4s,
                 biases_of_expert<GateUp, S>(Product<S>::kExpertGateUp, layer, expert) +
                     GateUp::tile_of_one(tile) * kTileFloat4s);
        }
        for (uint32_t place = 0; place < S::kPlaces; ++place) {
            const uint32_t expert = mem::load_plain(&shared.choice.expert[place]);
            const uint64_t first =
                biases_of_expert<Down, S>(Product<S>::kExpertDown, layer, expert) +
                of_down.first * kTileFloat4s;
            for (uint32_t i = 0; i < of_down.num; ++i) {
                copy(shared.of_down[place] + i * kTileFloat4s, first + i * kTileFloat4s);
            }
        }
    }
}

// Waits for the biases of a layer's chosen experts. The wait ends: warp 0 copies them even if its
// own wait for the logits has failed. Called by all consumer warps, before the first of them is
// added.
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
