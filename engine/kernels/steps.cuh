// The steps of a product: how a block's part of it is cut into the work of a warp.
#pragma once

#include "shape.cuh"

namespace kccl::decode {

// The work of a warp in a product. A step is one tile times four float4s of the staged vector. The
// steps go through the row tiles and their lanes.
struct Steps {
    uint32_t num;       // steps of all of the block's rows
    uint32_t each;      // steps of a row tile and lane
    uint32_t of_lanes;  // steps of the staged vector; after them it begins again
};

template <class M>
KCCL_CONSTEXPR Steps steps_of(uint32_t num_tiles) {
    return {num_tiles * M::kAllSteps, M::kSteps, M::kAllSteps};
}

// Returns the work of a warp of this block in a product, with the steps of all rows of the block.
template <class S>
KCCL_DECODE Steps steps_of_product(uint32_t block, Product<S> product) {
    using Dims = Shape<S>;
    const uint32_t block_in_group = Dims::block_in_group_of(block);
#define KCCL_STEPS(NAME)                                     \
    case Product<S>::k##NAME: {                              \
        using M = typename Dims::NAME;                       \
        return steps_of<M>(M::tiles_of(block_in_group).num); \
    }
    switch (product) {
        KCCL_OF_PRODUCTS(KCCL_STEPS)
        default: return steps_of<typename Dims::Head>(Dims::head_tiles_of(block).num);
    }
#undef KCCL_STEPS
}

// Where a product's tiles begin in a block's tiles of a layer.
template <class S>
KCCL_DECODE uint64_t packed_before(Product<S> product, uint32_t block_in_group) {
    return Products<S>::packed_of(block_in_group, static_cast<uint32_t>(product));
}

// Whether only products of experts have format F. Their first stage is not loaded before their
// vector has come: its registers would be spilled meanwhile. That of ExpertGateUp would not be
// there anyway, because it is copied when the experts are chosen.
template <class S, class F>
constexpr bool kIsOfExperts =
    (that_have_format<F, typename Shape<S>::Head>(Products<S>{}) & ~that_have_experts<S>()) == 0;

// Whether vectors of products in format F are staged as PairedFloat4s: those of experts that are
// multiplied in place and whose strips have whole pairs of tiles.
template <class S, class F>
constexpr bool kIsPaired = !S::kWeightsInRegisters && kHasScales<F> && !F::kHasMinimums &&
                           F::kStripTiles % 2 == 0 && kIsOfExperts<S, F>;

}  // namespace kccl::decode
