// Packs weights into tiles, on the device, so that only mma.cuh knows how a tile is packed, and
// only shape.cuh which block it belongs to.
#pragma once

#include "prefill_shape.cuh"
#include "product.cuh"

namespace kccl::decode {

template <class M, class S>
KCCL_DEVICE void pack_product(Product<S> product, uint16_t* weights, const uint16_t* matrix,
                              uint32_t layer, uint32_t group) {
    using Dims = Shape<S>;
    const uint32_t warps = platform::threads_per_block() / platform::kWarpSize;
    const uint32_t first =
        platform::block_in_grid() * warps + platform::thread_in_block() / platform::kWarpSize;
    for (uint32_t i = first; i < M::kTiles * M::kPacked; i += platform::blocks_per_grid() * warps) {
        const uint32_t tile = i / M::kPacked, in_row = i % M::kPacked;
        const uint32_t lane = in_row / (M::kSteps * S::kWarps);
        const uint32_t step = in_row / S::kWarps % M::kSteps, warp_index = in_row % S::kWarps;
        const uint32_t column = (warp_index * M::kSteps + step) * kTileColumns;
        const uint32_t owner = M::owner_of(tile);
        const bool is_of_all = product == Product<S>::kHead && !Dims::kHasHeadParts;
        const uint32_t block = is_of_all ? owner : Dims::block_of(group, owner);
        const uint32_t member = Dims::member_of(block);
        const uint64_t to = Dims::stream_of(block) + layer * Dims::packed_by(member) +
                            (product == Product<S>::kHead ? 0 : packed_before<S>(product, member)) +
                            uint64_t{tile - M::tiles_of(owner).first} * M::kPacked + in_row;
        uint16_t* const packed = weights + to * (kTileBytes / 2);
        for (uint32_t at = warp().index(); at < kTileRows * kTileColumns; at += warp().size()) {
            const uint32_t row = at / kTileColumns, within = at % kTileColumns;
            const uint64_t from = (uint64_t{tile} * kTileRows + row) * (M::kLanes * M::kColumns) +
                                  lane * M::kColumns + column + within;
            const uint16_t value =
                column < M::kColumns ? mem::load_plain(matrix + from) : uint16_t{0};
            mem::store_plain(packed + Mma<typename S::Weight>::offset(row, within) / 2, value);
        }
    }
}

// Packs one product of a layer and group; the head counts as that of layer kNumLayers, and of group
// 0 if it has no parts. `matrix` is row-major, [rows][lanes of the group][columns], 16 bits each.
template <class S>
KCCL_DEVICE void pack(uint16_t* weights, const uint16_t* matrix, uint64_t product, uint64_t layer,
                      uint64_t group) {
    using Dims = Shape<S>;
    const auto which = static_cast<Product<S>>(product);
    const auto l = static_cast<uint32_t>(layer), g = static_cast<uint32_t>(group);
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

// What the host must know of the shape.
template <class S>
KCCL_DEVICE void describe(KcclDecodeSizes* out) {
    if (platform::block_in_grid() != 0 || !leads(block())) return;
    using Dims = Shape<S>;
    out->shared = sizeof(Shared<S>);
    out->board = Places<S>::kQuads * sizeof(Quad);
    out->prefill_shared = 0;
    if constexpr (S::kChunk > 1) {
        out->board = Chunk<S>::kEnd * sizeof(Quad);
        out->prefill_shared = sizeof(PrefillShared<S>);
    }
    out->weights = Dims::stream_of(S::kBlocks) * kTileBytes;
    out->cache = uint64_t{S::kNumLayers} * Dims::kLanesHere * S::kKvHeads * Dims::kCacheTiles *
                 Dims::kCacheTileBytes;
    out->residuals = Places<S>::kResiduals;
    out->qkv = Places<S>::kQkv;
    out->attended = Places<S>::kParts;
    out->acts = Places<S>::kActs;
    out->stamps = Trace<S>::kOfRound;
}

}  // namespace kccl::decode
