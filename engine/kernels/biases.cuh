// Biases of products. They are added to the FP32 sum of a row; in Out and Down to that over all
// lanes, so that bits do not depend on the number of ranks.
//
// Task.biases is float [layer][...]: those of a layer's products, in their order and in that of the
// rank's packed rows. Products without biases have none there, and no code here.
#pragma once

#include "vectors.cuh"

namespace kccl::decode {

template <class S>
struct Biases {
    static constexpr uint32_t kThatHave = that_have_biases<S>();

    // In quads of a layer: of the products before this one.
    template <class... M>
    KCCL_CONSTEXPR static uint32_t before(Matrices<M...>, uint32_t product) {
        uint32_t i = 0, quads = 0;
        ((quads += i < product && (kThatHave >> i & 1u) != 0 ? M::kTiles * kTileQuads : 0, ++i),
         ...);
        return quads;
    }
    static constexpr uint32_t kLayer = before(Products<S>{}, S::kNumProducts);
    static_assert(kLayer == 0 || Shape<S>::kGroups == 1, "lanes share their residual");

    KCCL_CONSTEXPR static bool has(Product<S> product) { return is_one_of<kThatHave>(product); }

    // Where those of quad `quad` of the product's rows are.
    KCCL_CONSTEXPR static uint64_t at(Product<S> product, uint32_t layer, uint32_t quad) {
        return uint64_t{layer} * kLayer + before(Products<S>{}, static_cast<uint32_t>(product)) +
               quad;
    }
};

// The row tiles of a block of the group.
template <class S>
KCCL_DEVICE Cut tiles_of_product(Product<S> product, uint32_t member) {
#define KCCL_TILES(NAME) \
    case Product<S>::k##NAME: return Shape<S>::NAME::tiles_of(member);
    switch (product) {
        KCCL_OF_PRODUCTS(KCCL_TILES)
        default: return {};
    }
#undef KCCL_TILES
}

// Asks for the biases of the block's rows, which the cache may have lost since the last round.
// Called before the product is multiplied.
template <class S>
KCCL_DEVICE void prefetch_biases(const Worker<S>& worker, Product<S> product, uint32_t layer) {
    if constexpr (Biases<S>::kLayer != 0) {
        if (!Biases<S>::has(product)) return;
        const Cut tiles = tiles_of_product<S>(product, worker.member());
        constexpr uint32_t kEach = kKcclLineBytes / sizeof(Quad);
        const auto* const first = reinterpret_cast<const Quad*>(worker.task().biases) +
                                  Biases<S>::at(product, layer, tiles.first * kTileQuads);
        for (uint32_t i = worker.thread() * kEach; i < tiles.num * kTileQuads;
             i += platform::kWarpSize * kEach) {
            mem::prefetch(first + i);
        }
    }
}

// Sums of a quad of rows times `factor`, plus their biases.
template <class S>
KCCL_DEVICE Quad scaled(const Task& task, Product<S> product, uint32_t layer, uint32_t quad,
                        Quad sums, float factor) {
    if (Biases<S>::has(product)) {
        const Quad bias = load_quad(task.biases, Biases<S>::at(product, layer, quad));
        KCCL_UNROLL
        for (int i = 0; i < 4; ++i) {
            sums.value[i] = rounded_product(sums.value[i], factor) + bias.value[i];
        }
    } else {
        for (float& value : sums.value) value *= factor;
    }
    return sums;
}

// What all lanes add to a quad of the residual, plus the biases of the module's last product.
template <class S>
KCCL_DEVICE Quad plus_biases(const Task& task, uint32_t module, uint32_t quad, Quad total) {
    if constexpr ((Biases<S>::kThatHave & that_give<S>(Vector<S>::kResidual)) != 0) {
        const Product<S> product = last_of_module<S>(module % S::kNumModules);
        if (Biases<S>::has(product)) {
            const Quad bias =
                load_quad(task.biases, Biases<S>::at(product, module / S::kNumModules, quad));
            KCCL_UNROLL
            for (int i = 0; i < 4; ++i) total.value[i] += bias.value[i];
        }
    }
    return total;
}

}  // namespace kccl::decode
