// Packs a model's weights into tiles of 16 x 16, on the device, before any request. A format
// (format.cuh) knows how a tile is packed, and shape.cuh knows which block a tile belongs to.
#pragma once

#include "kv_cache.cuh"
#include "prefill_shape.cuh"
#include "product.cuh"

namespace kccl::decode {

// Packs tile `step` of warp `warp_index` in row tile `tile` of a matrix, for one of the lanes whose
// columns lie side by side. of_lane: where the packed tiles of the row tile and lane begin. Called
// by all threads of a warp.
template <class M, class S>
KCCL_DECODE void pack_tile(uint8_t* of_lane, const uint8_t* matrix, uint32_t tile, uint32_t lane,
                           uint32_t step, uint32_t warp_index) {
    using F = typename M::Format;
    const uint32_t column = (warp_index * M::kSteps + step) * kTileColumns;
    const uint64_t row = uint64_t{tile} * kTileRows, from = lane * M::kColumns + column;
    const uint32_t num = column < M::kColumns ? kTileColumns : 0;
    F::pack(of_lane + M::tile_at(step, warp_index), matrix, row, from, M::kLanes * M::kColumns,
            num);
    if constexpr (kHasScales<F>) {
        if (step % F::kStripTiles != 0) return;
        uint8_t* const strip = of_lane + M::strip_at(step, warp_index);
        F::pack_scales(strip + F::kStripTiles * F::kTileBytes, matrix, row, from,
                       M::kLanes * M::kColumns, num);
    }
}

template <class M, class S>
KCCL_DECODE void pack_product(Product<S> product, uint8_t* weights, const uint8_t* matrix,
                              uint32_t layer, uint32_t lane_group) {
    using Dims = Shape<S>;
    const uint32_t warps = platform::threads_per_block() / platform::kWarpSize;
    const uint32_t first =
        platform::block_in_grid() * warps + platform::thread_in_block() / platform::kWarpSize;
    for (uint32_t i = first; i < M::kTiles * M::kPacked; i += platform::blocks_per_grid() * warps) {
        const uint32_t tile = i / M::kPacked, in_row = i % M::kPacked;
        const uint32_t lane = in_row / (M::kSteps * S::kWarps);
        const uint32_t step = in_row / S::kWarps % M::kSteps, warp_index = in_row % S::kWarps;
        const uint32_t owner = M::owner_of(tile);
        const bool is_of_all = product == Product<S>::kHead && !Dims::kHasHeadParts;
        const uint32_t block = is_of_all ? owner : Dims::block_of(lane_group, owner);
        const uint32_t block_in_group = Dims::block_in_group_of(block);
        const uint64_t to =
            Dims::stream_of(block) + layer * Dims::packed_by(block_in_group) +
            (product == Product<S>::kHead ? 0 : packed_before<S>(product, block_in_group)) +
            uint64_t{tile - M::tiles_of(owner).first} * M::kPackedUnits +
            lane * M::kSteps * S::kWarps * M::kTileUnits;
        pack_tile<M, S>(weights + to * kUnitBytes<S>, matrix, tile, lane, step, warp_index);
    }
}

// Packs an expert's matrix of a product of experts. M: that of one expert. Called by all threads of
// a grid.
template <class M, class S>
KCCL_DECODE void pack_expert(uint8_t* to, const uint8_t* matrix) {
    const uint32_t warps = platform::threads_per_block() / platform::kWarpSize;
    const uint32_t first =
        platform::block_in_grid() * warps + platform::thread_in_block() / platform::kWarpSize;
    for (uint32_t i = first; i < M::kTiles * M::kPacked; i += platform::blocks_per_grid() * warps) {
        const uint32_t of_lanes = i / (M::kSteps * S::kWarps);
        pack_tile<M, S>(to + uint64_t{of_lanes} * M::kSteps * M::kStepBytes, matrix,
                        of_lanes / M::kLanes, of_lanes % M::kLanes, i / S::kWarps % M::kSteps,
                        i % S::kWarps);
    }
}

// Packs the weights of one product of a layer and lane group. The head counts as a product of layer
// kNumLayers, and of lane group 0 if it has no parts. For a product of experts, packs the matrix of
// expert `lane_group`: a mixture has one lane group. `matrix` is stored in the product's format,
// [rows][lanes of the lane group][columns]. Called by all threads of a grid.
template <class S>
KCCL_DECODE void pack(uint8_t* weights, const uint8_t* matrix, uint64_t product, uint64_t layer,
                      uint64_t lane_group) {
    using Dims = Shape<S>;
    const auto which = static_cast<Product<S>>(product);
    const auto l = static_cast<uint32_t>(layer), g = static_cast<uint32_t>(lane_group);
    if constexpr (S::kHasExperts) {
        using GateUp = typename Dims::ExpertGateUp;
        using Down = typename Dims::ExpertDown;
        const bool is_down = which == Product<S>::kExpertDown;
        uint8_t* const to =
            weights + (Dims::stream_of(S::kBlocks) + layer * ExpertMemory<S>::kLayer +
                       (is_down ? ExpertMemory<S>::kDownAt + lane_group * Down::kUnitsOfOne
                                : ExpertMemory<S>::kGateUpAt + lane_group * GateUp::kUnitsOfOne)) *
                          kUnitBytes<S>;
        if (is_down) return pack_expert<typename Down::One, S>(to, matrix);
        if (which == Product<S>::kExpertGateUp) {
            return pack_expert<typename GateUp::One, S>(to, matrix);
        }
    }
#define KCCL_PACK(NAME)                                                     \
    case Product<S>::k##NAME:                                               \
        pack_product<typename Dims::NAME, S>(which, weights, matrix, l, g); \
        break;
    switch (which) {
        KCCL_OF_PRODUCTS(KCCL_PACK)
        KCCL_PACK(Head)
        default: break;
    }
#undef KCCL_PACK
}

// Writes where packed weights lie, in bytes: for each block, and for one behind the last, where its
// weight stream begins; for each block how much a layer has in its weight stream; and how much a
// layer's experts have. Called by all threads of a grid.
template <class S>
KCCL_DECODE void locate(uint64_t* out) {
    if (platform::block_in_grid() != 0 || !leads(block())) return;
    using Dims = Shape<S>;
    for (uint32_t i = 0; i <= S::kBlocks; ++i) *out++ = Dims::stream_of(i) * kUnitBytes<S>;
    for (uint32_t i = 0; i < S::kBlocks; ++i) {
        *out++ = Dims::packed_by(Dims::block_in_group_of(i)) * kUnitBytes<S>;
    }
    *out = 0;
    if constexpr (S::kHasExperts) *out = ExpertMemory<S>::kLayer * kUnitBytes<S>;
}

// S, but with another number of columns, which are seats if the engine has such kernels. It
// samples, because that kernel's block has more memory.
template <class S, uint32_t COLUMNS>
struct WithColumns : S {
    static constexpr uint32_t kColumns = COLUMNS;
    static constexpr bool kSamples = true;
    static constexpr bool kHasSeats = S::kMostSeats > 1 && COLUMNS > 1;
    static constexpr uint32_t kStageSteps = kHasSeats ? S::kSeatStageSteps : S::kStageSteps;
};
// Returns the largest number of columns, up to S::kMostColumns, with which the ring of weights
// still has three stages, or as many as with one column if these are fewer.
template <class S, uint32_t COLUMNS = 2>
KCCL_CONSTEXPR uint32_t most_columns() {
    if constexpr (COLUMNS > S::kMostColumns || S::kWeightsInRegisters || S::kHasExperts) {
        return COLUMNS - 1;
    } else {
        constexpr uint32_t kLeast = 3;
        using T = WithColumns<S, COLUMNS>;
        constexpr uint64_t kEach = Shape<T>::kStageBytes + 2 * sizeof(mem::CopyBarrier);
        constexpr uint64_t kRest = sizeof(Beside<T>) + 2 * kKcclLineBytes;
        constexpr uint64_t kStages = least_of(kLeast, num_stages<WithColumns<S, 1>>());
        if constexpr (kRest + kStages * kEach > S::kSharedBytes) {
            return COLUMNS - 1;
        } else {
            return most_columns<S, COLUMNS + 1>();
        }
    }
}

// Writes the sizes that the host must know (KcclDecodeSizes) to *out. Called by all threads of a
// grid.
template <class S>
KCCL_DECODE void describe(KcclDecodeSizes* out) {
    if (platform::block_in_grid() != 0 || !leads(block())) return;
    using Dims = Shape<S>;
    out->shared = sizeof(Shared<S>);
    out->exchange_buffer = Slots<S>::kFloat4s * sizeof(Float4);
    out->prefill_shared = 0;
    if constexpr (S::kChunk > 1) {
        out->exchange_buffer = ChunkLayout<S>::kEnd * sizeof(Float4);
        out->prefill_shared = sizeof(PrefillShared<S>);
    }
    out->most_columns = most_columns<S>();
    out->weights = Dims::stream_of(S::kBlocks) * kUnitBytes<S>;
    if constexpr (S::kHasExperts) {
        out->weights += S::kNumLayers * ExpertMemory<S>::kLayer * kUnitBytes<S>;
    }
    out->cache = kCacheHeads<S> * Dims::kCacheTiles * Dims::kCacheTileBytes;
    out->residuals = Slots<S>::kResiduals;
    out->qkv = Slots<S>::kQkv;
    out->attended = Slots<S>::kPartials;
    out->acts = Slots<S>::kActs;
    out->routed = Slots<S>::kRouted;
    out->stamps = Trace<S>::kOfTokenStep;
}

}  // namespace kccl::decode
