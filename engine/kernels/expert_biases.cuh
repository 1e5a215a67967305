// Adds the biases of the chosen experts. Which they are is known behind the router, so they are
// prefetched then.
#pragma once

#include "biases.cuh"

namespace kccl::decode {

// Returns which float4 of Task.biases has those of an expert's rows 0 to 3. M: the product's
// matrix.
template <class M, class S>
KCCL_DECODE uint64_t biases_of_expert(Product<S> product, uint32_t layer, uint32_t expert) {
    return Biases<S>::at(product, layer, 0) + uint64_t{expert} * M::One::kTiles * kTileFloat4s;
}

// Prefetches the biases of the chosen experts for the block's rows. Called by all threads of warp
// 0, when the choice is written.
template <class S>
KCCL_DECODE void prefetch_expert_biases(ConsumerWarp<S>& consumer, uint32_t layer) {
    using GateUp = typename Shape<S>::ExpertGateUp;
    using Down = typename Shape<S>::ExpertDown;
    const uint32_t* const experts = consumer.shared().choice.expert;
    const auto* const biases = reinterpret_cast<const Float4*>(consumer.task().biases);
    if (Biases<S>::has(Product<S>::kExpertGateUp)) {
        const Cut tiles = GateUp::tiles_of(consumer.block_in_group());
        for (uint32_t i = consumer.thread(); i < tiles.num; i += platform::kWarpSize) {
            const uint32_t tile = tiles.first + i;
            const uint32_t expert = mem::load_plain(experts + GateUp::place_of(tile));
            mem::prefetch(biases +
                          biases_of_expert<GateUp, S>(Product<S>::kExpertGateUp, layer, expert) +
                          GateUp::tile_of_one(tile) * kTileFloat4s);
        }
    }
    if (Biases<S>::has(Product<S>::kExpertDown)) {
        const Cut tiles = Down::tiles_of(consumer.block_in_group());
        for (uint32_t i = consumer.thread(); i < tiles.num * S::kPlaces; i += platform::kWarpSize) {
            const uint32_t expert = mem::load_plain(experts + i % S::kPlaces);
            mem::prefetch(biases +
                          biases_of_expert<Down, S>(Product<S>::kExpertDown, layer, expert) +
                          (tiles.first + i / S::kPlaces) * kTileFloat4s);
        }
    }
}

// Returns the sums of four rows of a row tile of ExpertGateUp times `factor`, plus the biases of
// these rows if the product has any. i: the number of the float4 within the tile.
template <class S>
KCCL_DECODE Float4 scaled_by_expert(ConsumerWarp<S>& consumer, uint32_t layer, uint32_t tile,
                                    uint32_t i, Float4 sums, float factor) {
    using M = typename Shape<S>::ExpertGateUp;
    constexpr Product<S> kProduct = Product<S>::kExpertGateUp;
    KCCL_UNROLL
    for (float& value : sums.value) value = rounded_product(value, factor);
    if (Biases<S>::has(kProduct)) {
        const uint32_t expert =
            mem::load_plain(&consumer.shared().choice.expert[M::place_of(tile)]);
        const Float4 bias =
            load_float4(consumer.task().biases, biases_of_expert<M, S>(kProduct, layer, expert) +
                                                    M::tile_of_one(tile) * kTileFloat4s + i);
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
            if (!Biases<S>::has(kProduct)) return total;
            Float4 biases = {};
            KCCL_UNROLL
            for (uint32_t place = 0; place < S::kPlaces; ++place) {
                const auto& choice = consumer.shared().choice;
                const uint32_t expert = mem::load_plain(&choice.expert[place]);
                const float share = mem::load_plain(&choice.share[place]);
                const Float4 bias = load_float4(
                    consumer.task().biases,
                    biases_of_expert<M, S>(kProduct, module / S::kNumModules, expert) + index4);
                KCCL_UNROLL
                for (int i = 0; i < 4; ++i) {
                    biases.value[i] += rounded_product(share, bias.value[i]);
                }
            }
            KCCL_UNROLL
            for (int i = 0; i < 4; ++i) total.value[i] += biases.value[i];
            return total;
        }
    }
    return plus_biases<S>(consumer.task(), module, index4, total);
}

}  // namespace kccl::decode
