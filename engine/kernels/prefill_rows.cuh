// What a block does in prefill with its rows of a chunk's vectors: embeds the ids, computes the
// norms, and finishes the rows of the products that give no residual (prefill_residual.cuh).
#pragma once

#include "gate_up.cuh"
#include "prefill_attend.cuh"

namespace kccl::decode {

// Calls f(row tile, number of a position, float4 of the tile) for the first `num_float4s` float4s
// of each of the block's row tiles, for all positions of a chunk. The threads of the consumer warps
// share the calls, so that neighbouring threads store to neighbouring addresses.
template <class S, class F>
KCCL_DECODE void for_each_row(PrefillConsumer<S>& consumer, uint32_t num_tiles,
                              uint32_t num_float4s, F f) {
    const uint32_t each = S::kChunk * num_float4s;
    for (uint32_t i = consumer.index(); i < num_tiles * each; i += PrefillConsumer<S>::kThreads) {
        f(i / each, i % each / num_float4s, i % num_float4s);
    }
}

template <class S>
KCCL_DECODE Float4 norm_of(PrefillConsumer<S>& consumer, uint32_t norm, uint32_t index4) {
    return load_float4(consumer.task().norms, uint64_t{norm} * (S::kHidden / 4) + index4);
}

// Stages float4 `index4` of the residual x of position `number`, times `weights`, the weights of
// the next module's norm. NEXT: the next module's first product, which multiplies it.
template <auto NEXT, class S>
KCCL_DECODE void stage_normed(PrefillConsumer<S>& consumer, const Float4& weights, uint32_t index4,
                              uint32_t number, const Float4& x) {
    const Float4 seen = untagged(x);
    Float4 scaled;
    KCCL_UNROLL
    for (int i = 0; i < 4; ++i) scaled.value[i] = seen.value[i] * weights.value[i];
    const uint32_t slot =
        ChunkLayout<S>::kNormed +
        consumer.lane_group() * ChunkLayout<S>::QkvPlan::kTiles * ChunkLayout<S>::kStripe +
        ChunkLayout<S>::at(index4, number);
    mem::store_plain(reinterpret_cast<StagedFloat4*>(consumer.here(slot)),
                     split<typename MatrixOf<S, NEXT>::Format::Operand>(scaled));
    if constexpr (S::kHasExperts) {
        if constexpr (NEXT == Product<S>::kRouter) {
            const uint32_t of_experts = ChunkLayout<S>::kMlp + ChunkLayout<S>::Mlp::kNormed +
                                        ChunkLayout<S>::at(index4, number);
            mem::store_plain(reinterpret_cast<StagedFloat4*>(consumer.here(of_experts)),
                             split<typename Shape<S>::ExpertGateUp::Format::Operand>(scaled));
        }
    }
}

template <class S>
KCCL_DECODE Float4* residual_at(PrefillConsumer<S>& consumer, uint32_t index4, uint32_t number) {
    return consumer.here(ChunkLayout<S>::kResidual +
                         consumer.lane_group() * ChunkLayout<S>::kHiddenFloat4s +
                         ChunkLayout<S>::at(index4, number));
}

// Writes the block's rows of the residual before the first layer: the embeddings of the chunk's
// ids. The slots of positions behind the prompt's last one get zeros.
template <class S>
KCCL_DECODE void embed_chunk(PrefillConsumer<S>& consumer, const PromptChunk& chunk) {
    const Cut tiles = consumer.template tiles<typename Shape<S>::Out>();
    const auto* const ids = reinterpret_cast<const int32_t*>(consumer.task().ids) + chunk.first;
    for_each_row(
        consumer, tiles.num, kTileFloat4s, [&](uint32_t tile, uint32_t number, uint32_t i) {
            const uint32_t index4 = (tiles.first + tile) * kTileFloat4s + i;
            const bool is_there = number < chunk.num;
            const Float4 x =
                is_there ? embedded<S>(consumer.task(), mem::load_plain(ids + number), index4)
                         : Float4{};
            mem::store_plain(residual_at(consumer, index4, number), x);
            stage_normed<next_product<S>(0)>(consumer, norm_of(consumer, 0, index4), index4, number,
                                             x);
        });
}

// Computes the scales (1 / the root of the residual's mean square) of this block's share of the
// positions, for all blocks of the lane group. Squares are added up in the order of decode, so that
// the bits are the same. Called by all consumer warps.
template <class S>
KCCL_DECODE void make_scales(PrefillConsumer<S>& consumer) {
    using M = typename Shape<S>::Qkv;
    constexpr uint32_t kEach = ceil_div(M::kFloat4s, platform::kWarpSize);
    const uint32_t stride = consumer.squad_blocks(), first = consumer.block_in_squad();
    const uint32_t num = first < S::kChunk ? ceil_div(S::kChunk - first, stride) : 0;
    auto& squares_of = consumer.shared().squares;
    for (uint32_t job = consumer.warp_index(); job < num * S::kWarps; job += S::kChunkWarps) {
        const uint32_t number = first + job / S::kWarps * stride;
        const uint32_t part = job % S::kWarps;
        float squares = 0;
        KCCL_UNROLL
        for (uint32_t k = 0; k < kEach; ++k) {
            const uint32_t i = warp().index() + k * platform::kWarpSize;
            const uint32_t index4 = part * M::kFloat4s + i;
            const bool is_there = i < M::kFloat4s && index4 < M::kColumns / 4;
            const Float4 x = is_there
                                 ? untagged(mem::load_plain(residual_at(consumer, index4, number)))
                                 : Float4{};
            for (const float value : x.value) squares += value * value;
        }
        squares = sum_of_warp(squares);
        if (leads(warp())) mem::store_plain(&squares_of[number][part], squares);
    }
    consumer.meet();
    auto* const scales = reinterpret_cast<float*>(consumer.here(ChunkLayout<S>::kScales)) +
                         consumer.lane_group() * S::kChunk;
    for (uint32_t i = consumer.index(); i < num; i += PrefillConsumer<S>::kThreads) {
        const uint32_t number = first + i * stride;
        float squares = 0;
        for (uint32_t part = 0; part < S::kWarps; ++part) {
            squares += mem::load_plain(&squares_of[number][part]);
        }
        mem::store_plain(scales + number,
                         reciprocal_root(squares * (1.0f / S::kHidden) + S::kNormEps));
    }
}

template <class S>
KCCL_DECODE float scale_of(PrefillConsumer<S>& consumer, uint32_t number) {
    return mem::load_plain(reinterpret_cast<const float*>(consumer.here(ChunkLayout<S>::kScales)) +
                           consumer.lane_group() * S::kChunk + number);
}

// Finishes the rows of a round of Qkv: writes queries, keys and values.
template <class S>
KCCL_DECODE void finish_qkv(PrefillConsumer<S>& consumer, uint32_t layer, const Cut& tiles) {
    using Dims = Shape<S>;
    constexpr uint32_t kTiles = Dims::kQkvRows / kTileRows;
    for_each_row(
        consumer, tiles.num, kTileFloat4s, [&](uint32_t tile, uint32_t number, uint32_t i) {
            const uint32_t index4 = (tiles.first + tile) * kTileFloat4s + i;
            const Float4 total =
                scaled<S>(consumer.task(), Product<S>::kQkv, layer, index4,
                          total_of(consumer, tile, number, i), scale_of(consumer, number));
            const uint32_t row = consumer.first_lane_here() * kTiles + tiles.first + tile;
            const uint32_t slot =
                ChunkLayout<S>::kQkv + row * ChunkLayout<S>::kStripe + number * kTileFloat4s + i;
            mem::store_plain(consumer.here(slot), untagged(total));
        });
}

// Finishes the rows of a round of GateUp: writes the MLP's hidden vectors.
template <class S>
KCCL_DECODE void finish_acts(PrefillConsumer<S>& consumer, uint32_t layer, const Cut& tiles) {
    using C = ChunkLayout<S>;
    constexpr uint32_t kFloat4s = kTileFloat4s / 2, kLane = Slots<S>::kFfnFloat4s;
    for_each_row(consumer, tiles.num, kFloat4s, [&](uint32_t tile, uint32_t number, uint32_t i) {
        const float inverse = scale_of(consumer, number);
        const Float4 act = act_of<S>(consumer.task(), layer, tiles.first + tile, i,
                                     total_of(consumer, tile, number, i),
                                     total_of(consumer, tile, number, i + kFloat4s), inverse);
        const uint32_t feature = (tiles.first + tile) * kFloat4s + i;
        const uint32_t lane = consumer.first_lane_here() + feature / kLane;
        const uint32_t slot = C::kActs + lane * C::Mlp::DownPlan::kTiles * C::kStripe +
                              C::at(feature % kLane, number);
        mem::store_plain(reinterpret_cast<StagedFloat4*>(consumer.here(slot)),
                         split<typename Shape<S>::Down::Format::Operand>(untagged(act)));
    });
}

}  // namespace kccl::decode
