// The experts that the positions of a chunk pass in a layer. Each block chooses for all positions,
// from the same logits, and groups the positions by expert.
#pragma once

#include "choose_experts.cuh"
#include "prefill_rows.cuh"

namespace kccl::decode {

constexpr uint8_t kNoPlace = 0xff;

// The choice of a chunk, in shared memory. It lies in the ring's stages: no product uses them from
// the router's on until the residual has what the experts give.
template <class S>
struct ChunkChoice {
    ExpertChoice<S> of[S::kChunk];
    // [expert][position]: which of the position's places the expert has, or kNoPlace.
    alignas(16) uint8_t places[S::kExperts][S::kChunk];
    // For each expert, the positions that chose it, in ascending order. Expert e has num[e] of
    // them, which begin at positions[first[e]].
    uint16_t positions[S::kChunk * S::kPlaces];
    uint16_t first[S::kExperts];
    uint16_t num[S::kExperts];
    // The experts that some position passes, in ascending order.
    uint16_t experts[S::kExperts];
    uint32_t num_experts;
};

// What the experts' products have in shared memory.
template <class S>
struct ExpertsArea {
    using Down = typename Shape<S>::ExpertDown;
    using Unit = Mma<typename Down::Format::Operand>;

    ChunkChoice<S> choice;
    // The sums of a row tile of ExpertDown, as Mma's Lane stores them: [part of the columns]...
    mem::Line sums[S::kWarps][S::kChunk][Unit::kSumsLines];
    // [warp]: the sums of a row tile for a group of positions.
    Float4 rows[S::kChunkWarps][Unit::kVectors][kTileFloat4s];
};

template <class S>
KCCL_DECODE ExpertsArea<S>& experts_area(PrefillConsumer<S>& consumer) {
    auto& stages = consumer.shared().ring.stage;
    static_assert(sizeof(ExpertsArea<S>) <= sizeof(stages), "the ring has enough memory");
    return *reinterpret_cast<ExpertsArea<S>*>(stages[0]);
}

// Stores the logits of the block's rows of the router.
template <class S>
KCCL_DECODE void finish_router_chunk(PrefillConsumer<S>& consumer, uint32_t layer) {
    using C = ChunkLayout<S>;
    const Cut tiles = Shape<S>::Router::tiles_of(consumer.block_in_group());
    for_each_row(
        consumer, tiles.num, kTileFloat4s, [&](uint32_t tile, uint32_t number, uint32_t i) {
            const uint32_t index4 = (tiles.first + tile) * kTileFloat4s + i;
            const Float4 logits =
                scaled<S>(consumer.task(), Product<S>::kRouter, layer, index4,
                          total_of(consumer, tile, number, i), scale_of(consumer, number));
            mem::store_plain(consumer.here(C::kMlp + C::Mlp::kRouted + C::at(index4, number)),
                             untagged(logits));
        });
}

// Chooses the experts of one position. Called by all threads of a warp.
template <class S>
KCCL_DECODE void choose_position(PrefillConsumer<S>& consumer, uint32_t number) {
    using C = ChunkLayout<S>;
    constexpr uint32_t kFloat4s = kRouterRows<S> / 4;
    Float4 float4s[ceil_div(kFloat4s, platform::kWarpSize)];
    uint32_t index4 = warp().index();
    for (Float4& four : float4s) {
        const uint32_t slot =
            C::kMlp + C::Mlp::kRouted + C::at(index4 < kFloat4s ? index4 : 0, number);
        four = mem::load_plain(consumer.here(slot));
        index4 += platform::kWarpSize;
    }
    choose_experts(float4s, &experts_area(consumer).choice.of[number]);
}

// Makes an expert's list of positions. Lists of the experts before it may be made at the same time.
template <class S>
KCCL_DECODE void list_positions(ChunkChoice<S>& choice, uint32_t expert) {
    uint32_t first = 0, num_before = 0;
    for (uint32_t before = 0; before < expert; ++before) {
        const uint32_t num = mem::load_plain(&choice.num[before]);
        first += num;
        num_before += num != 0 ? 1 : 0;
    }
    mem::store_plain(&choice.first[expert], static_cast<uint16_t>(first));
    const bool has_any = mem::load_plain(&choice.num[expert]) != 0;
    if (has_any) {
        mem::store_plain(&choice.experts[num_before], static_cast<uint16_t>(expert));
        for (uint32_t number = 0; number < S::kChunk; ++number) {
            if (mem::load_plain(&choice.places[expert][number]) == kNoPlace) continue;
            mem::store_plain(&choice.positions[first++], static_cast<uint16_t>(number));
        }
    }
    if (expert + 1 == S::kExperts) {
        mem::store_plain(&choice.num_experts, num_before + (has_any ? 1u : 0u));
    }
}

// Chooses the experts of all positions of a chunk, and makes the lists of positions. Called by all
// consumer warps, which have met when it returns.
template <class S>
KCCL_DECODE void choose_chunk(PrefillConsumer<S>& consumer, const PromptChunk& chunk) {
    constexpr uint32_t kThreads = PrefillConsumer<S>::kThreads;
    ChunkChoice<S>& choice = experts_area(consumer).choice;
    auto* const words = reinterpret_cast<uint32_t*>(choice.places);
    for (uint32_t i = consumer.index(); i < sizeof(choice.places) / sizeof(uint32_t);
         i += kThreads) {
        mem::store_plain(words + i, ~0u);
    }
    for (uint32_t number = consumer.warp_index(); number < chunk.num; number += S::kChunkWarps) {
        choose_position(consumer, number);
    }
    consumer.meet();
    for (uint32_t i = consumer.index(); i < chunk.num * S::kPlaces; i += kThreads) {
        const uint32_t number = i / S::kPlaces, place = i % S::kPlaces;
        const uint32_t expert = mem::load_plain(&choice.of[number].expert[place]);
        mem::store_plain(&choice.places[expert][number], static_cast<uint8_t>(place));
    }
    consumer.meet();
    for (uint32_t expert = consumer.index(); expert < S::kExperts; expert += kThreads) {
        uint32_t num = 0;
        for (uint32_t number = 0; number < S::kChunk; ++number) {
            num += mem::load_plain(&choice.places[expert][number]) != kNoPlace ? 1 : 0;
        }
        mem::store_plain(&choice.num[expert], static_cast<uint16_t>(num));
    }
    consumer.meet();
    for (uint32_t expert = consumer.index(); expert < S::kExperts; expert += kThreads) {
        list_positions(choice, expert);
    }
    consumer.meet();
}

}  // namespace kccl::decode
