// Adds the biases of products. A bias is added to the FP32 sum of its row. In Out and Down it is
// added to the sum over all lanes, so that the result has the same bits on any number of ranks.
//
// Task.biases is float [layer][...]. A layer has the biases of its products, in the order of the
// products, and for each product in the order of the rank's packed rows; a product of experts has
// those of all experts, one behind the other. Products without biases have no entries, and need no
// code.
#pragma once

#include "vectors.cuh"

namespace kccl::decode {

template <class S>
struct Biases {
    // Bit i is set if product i of a layer has biases.
    static constexpr uint32_t kThatHave = that_have_biases<S>();

    // Returns how many float4s of biases the first `product` products of a layer have.
    template <class... M>
    KCCL_CONSTEXPR static uint32_t before(Matrices<M...>, uint32_t product) {
        uint32_t i = 0, num_float4s = 0;
        ((num_float4s +=
          i < product && (kThatHave >> i & 1u) != 0 ? M::kBiasTiles * kTileFloat4s : 0,
          ++i),
         ...);
        return num_float4s;
    }
    static constexpr uint32_t kLayer = before(Products<S>{}, S::kNumProducts);
    static_assert(kLayer == 0 || Shape<S>::kLaneGroups == 1, "lanes share their residual");

    KCCL_CONSTEXPR static bool has(Product<S> product) { return is_one_of<kThatHave>(product); }

    // Returns which float4 of Task.biases has the biases of four rows of a layer's product: the
    // rows from 4 * index4 on, among the rank's packed rows.
    KCCL_CONSTEXPR static uint64_t at(Product<S> product, uint32_t layer, uint32_t index4) {
        return uint64_t{layer} * kLayer + before(Products<S>{}, static_cast<uint32_t>(product)) +
               index4;
    }
};

// Returns which row tiles of a product a block of the lane group has.
template <class S>
KCCL_DECODE Cut tiles_of_product(Product<S> product, uint32_t block_in_group) {
#define KCCL_TILES(NAME) \
    case Product<S>::k##NAME: return Shape<S>::NAME::tiles_of(block_in_group);
    switch (product) {
        KCCL_OF_PRODUCTS(KCCL_TILES)
        default: return {};
    }
#undef KCCL_TILES
}

// Prefetches the biases of the block's rows, because the cache may have dropped them since the last
// token step. Called before the product is multiplied.
template <class S>
KCCL_DECODE void prefetch_biases(const ConsumerWarp<S>& consumer, Product<S> product,
                                 uint32_t layer) {
    if constexpr (Biases<S>::kLayer != 0) {
        if (!Biases<S>::has(product) || is_one_of<that_have_experts<S>()>(product)) return;
        const Cut tiles = tiles_of_product<S>(product, consumer.block_in_group());
        constexpr uint32_t kEach = kKcclLineBytes / sizeof(Float4);
        const auto* const first = reinterpret_cast<const Float4*>(consumer.task().biases) +
                                  Biases<S>::at(product, layer, tiles.first * kTileFloat4s);
        for (uint32_t i = consumer.thread() * kEach; i < tiles.num * kTileFloat4s;
             i += platform::kWarpSize * kEach) {
            mem::prefetch(first + i);
        }
    }
}

// Returns the sums of four rows times `factor`, plus the biases of these rows if the product has
// any. index4: the number of this float4 among the rank's packed rows of the product.
template <class S>
KCCL_DECODE Float4 scaled(const Task& task, Product<S> product, uint32_t layer, uint32_t index4,
                          Float4 sums, float factor) {
    if (Biases<S>::has(product)) {
        const Float4 bias = load_float4(task.biases, Biases<S>::at(product, layer, index4));
        KCCL_UNROLL
        for (int i = 0; i < 4; ++i) {
            sums.value[i] = rounded_product(sums.value[i], factor) + bias.value[i];
        }
    } else {
        for (float& value : sums.value) value *= factor;
    }
    return sums;
}

// Returns `total`, the sum over all lanes for float4 `index4` of the residual, plus the biases of
// the module's last product if it has any.
template <class S>
KCCL_DECODE Float4 plus_biases(const Task& task, uint32_t module, uint32_t index4, Float4 total) {
    if constexpr ((Biases<S>::kThatHave & that_give<S>(Vector<S>::kResidual)) != 0) {
        const Product<S> product = last_of_module<S>(module % S::kNumModules);
        if (Biases<S>::has(product)) {
            const Float4 bias =
                load_float4(task.biases, Biases<S>::at(product, module / S::kNumModules, index4));
            KCCL_UNROLL
            for (int i = 0; i < 4; ++i) total.value[i] += bias.value[i];
        }
    }
    return total;
}

}  // namespace kccl::decode
