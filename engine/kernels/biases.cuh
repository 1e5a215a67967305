// Biases of products. They are added to the FP32 sum of a row; in Out and Down to that over all
// lanes, so that bits do not depend on the number of ranks.
//
// Task.biases is float [layer][...]: those of Qkv, Out, GateUp and Down, in this order and in that
// of the rank's packed rows. Products without biases have none there, and no code here.
#pragma once

#include "vectors.cuh"

namespace kccl::decode {

template <class S>
struct Biases {
    using Dims = Shape<S>;
    // In quads of a layer.
    static constexpr uint32_t kOut = S::kHasQkvBias ? Dims::Qkv::kTiles * kTileQuads : 0;
    static constexpr uint32_t kGateUp = kOut + (S::kHasOutBias ? S::kHidden / 4 : 0);
    static constexpr uint32_t kDown =
        kGateUp + (S::kHasGateUpBias ? Dims::GateUp::kTiles * kTileQuads : 0);
    static constexpr uint32_t kLayer = kDown + (S::kHasDownBias ? S::kHidden / 4 : 0);
    static_assert(kLayer == 0 || Dims::kGroups == 1, "lanes share their residual");

    KCCL_CONSTEXPR static bool has(Product product) {
        switch (product) {
            case Product::kQkv: return S::kHasQkvBias;
            case Product::kOut: return S::kHasOutBias;
            case Product::kGateUp: return S::kHasGateUpBias;
            case Product::kDown: return S::kHasDownBias;
            default: return false;
        }
    }

    // Where those of quad `quad` of the product's rows are.
    KCCL_CONSTEXPR static uint64_t at(Product product, uint32_t layer, uint32_t quad) {
        uint32_t first = kDown;
        if (product == Product::kQkv) first = 0;
        if (product == Product::kOut) first = kOut;
        if (product == Product::kGateUp) first = kGateUp;
        return uint64_t{layer} * kLayer + first + quad;
    }
};

// Asks for the biases of the block's rows, which the cache may have lost since the last round.
// Called before the product is multiplied.
template <class S>
KCCL_DEVICE void prefetch_biases(const Worker<S>& worker, Product product, uint32_t layer) {
    using Dims = Shape<S>;
    if constexpr (Biases<S>::kLayer != 0) {
        if (!Biases<S>::has(product)) return;
        const uint32_t member = worker.member();
        const Cut tiles = product == Product::kQkv      ? Dims::Qkv::tiles_of(member)
                          : product == Product::kGateUp ? Dims::GateUp::tiles_of(member)
                                                        : Dims::Out::tiles_of(member);
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
KCCL_DEVICE Quad scaled(const Task& task, Product product, uint32_t layer, uint32_t quad, Quad sums,
                        float factor) {
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
    if constexpr (S::kHasOutBias || S::kHasDownBias) {
        const Product product = module % 2 == 0 ? Product::kOut : Product::kDown;
        if (Biases<S>::has(product)) {
            const Quad bias = load_quad(task.biases, Biases<S>::at(product, module / 2, quad));
            KCCL_UNROLL
            for (int i = 0; i < 4; ++i) total.value[i] += bias.value[i];
        }
    }
    return total;
}

}  // namespace kccl::decode
