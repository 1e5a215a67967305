// The KV cache of a rank: where the keys and values of a KV head lie, and how a position's key and
// value are stored.
#pragma once

#include "exchange_buffer.cuh"

namespace kccl::decode {

// Returns a value as the cache stores it: in half precision, clamped to the largest finite number.
// A NaN becomes a number, too. A NaN in the cache would spread to later requests: these give a
// position that they do not see the weight 0, but 0 times NaN is NaN.
KCCL_DECODE uint16_t cached(float value) {
    constexpr float kMost = 65504.0f;
    const float most = value < kMost ? value : kMost;
    return Element<f16>::narrow(most > -kMost ? most : -kMost).bits;
}

// Returns the address at which the cache of a KV head begins, in a layer. `lane` counts the lanes
// of this rank.
template <class S>
KCCL_DECODE uint8_t* cache_of(const Task& task, uint32_t layer, uint32_t lane, uint32_t kv_head) {
    using Dims = Shape<S>;
    const uint64_t head =
        uint64_t{layer} * Dims::kLanesHere * S::kKvHeads + lane * S::kKvHeads + kv_head;
    return reinterpret_cast<uint8_t*>(task.cache) +
           head * Dims::kCacheTiles * Dims::kCacheTileBytes;
}

// The number of KV heads in a rank's cache, over all layers.
template <class S>
constexpr uint64_t kCacheHeads = uint64_t{S::kNumLayers} * Shape<S>::kLanesHere * S::kKvHeads;

// Copies the keys and values of the first `num` positions from one sequence's cache to another's.
// Called by all threads of a grid. Nothing else may use the cache meanwhile.
template <class S>
KCCL_DECODE void copy_cache(uint8_t* to, const uint8_t* from, uint64_t num) {
    using Dims = Shape<S>;
    constexpr uint64_t kOfTile = Dims::kCacheTileBytes / sizeof(mem::Line);
    const uint64_t each = (num + kTileRows - 1) / kTileRows * kOfTile;
    const uint64_t in_block = platform::threads_per_block();
    const uint64_t first = platform::block_in_grid() * in_block + platform::thread_in_block();
    for (uint64_t i = first; i < kCacheHeads<S> * each;
         i += platform::blocks_per_grid() * in_block) {
        const uint64_t at = i / each * (Dims::kCacheTiles * kOfTile) + i % each;
        mem::store_plain(reinterpret_cast<mem::Line*>(to) + at,
                         mem::load_plain(reinterpret_cast<const mem::Line*>(from) + at));
    }
}

// Writes a position's key and value into its tile of the cache. Records whether one of them has a
// NaN (bad_request_at), because the cache no longer shows it. A draft's is not recorded: the draft
// may be rejected, and if not, its logits show it. Called by all threads of the warp. Each thread
// passes its float4 of the key and of the value. What threads beyond the head's end pass is not
// used.
template <class S>
KCCL_DECODE void append(const Task& task, int rank, uint8_t* tile, uint32_t position,
                        const Float4& key, const Float4& value, bool is_draft = false) {
    using Dims = Shape<S>;
    using Unit = Mma<f16>;
    if (warp().index() >= Dims::kHeadFloat4s) return;
    bool is_bad = false;
    KCCL_UNROLL
    for (int i = 0; i < 4; ++i) {
        is_bad |= key.value[i] != key.value[i] || value.value[i] != value.value[i];
    }
    if (is_bad && !is_draft) {
        mem::store<mem::Order::kRelaxed, mem::Scope::kDevice>(bad_request_at<S>(task, rank),
                                                              task.number);
    }
    uint8_t* const keys = tile;
    uint8_t* const values = keys + Dims::kHeadTilesOfDim * kTileBytes;
    const uint32_t at = position % kTileRows;
    KCCL_UNROLL
    for (uint32_t i = 0; i < 4; ++i) {
        const uint32_t dim = mem::forget(warp().index()) * 4 + i;
        const uint32_t tile = dim / kTileColumns * kTileBytes, in_tile = dim % kTileColumns;
        const uint32_t key_at = Unit::offset(Unit::key_row(at), in_tile);
        mem::store_plain(reinterpret_cast<uint16_t*>(keys + tile + key_at), cached(key.value[i]));
        mem::store_plain(reinterpret_cast<uint16_t*>(values + tile + Unit::offset(in_tile, at)),
                         cached(value.value[i]));
    }
}

}  // namespace kccl::decode
