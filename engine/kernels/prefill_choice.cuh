// The experts that the positions of a chunk pass in a layer. Each block chooses for all positions,
// from the same logits, and groups the positions by expert.
#pragma once

#include "choose_experts.cuh"
#include "prefill_rows.cuh"

namespace kccl::decode {

// A position in an expert's list, and which of the position's places the expert has.
struct Listed {
    static constexpr uint32_t kPlaceAt = 11;
    KCCL_DECODE uint32_t number() const { return bits & ((1u << kPlaceAt) - 1); }
    KCCL_DECODE uint32_t place() const { return bits >> kPlaceAt; }
    uint16_t bits;
};

// The choice of a chunk, in shared memory. It lies in the ring's stages (PrefillShared::in_stages):
// no product uses them from the router's on until the residual has what the experts give.
template <class S>
struct ChunkChoice {
    // ExpertDown cuts a chunk into kShares shares of neighbouring positions.
    static constexpr uint32_t kShares = S::kChunkShares, kShare = S::kChunk / kShares;
    static constexpr uint32_t kLists = S::kExperts * kShares;
    static_assert(S::kChunk <= 1u << Listed::kPlaceAt &&
                      S::kPlaces <= 1u << (16 - Listed::kPlaceAt),
                  "16 bits for a position and a place");
    ExpertChoice<S> of[S::kChunk];
    // For each expert and share, the positions that pass the expert, in ascending order. Those of
    // list i begin at listed[begins[i]], where i counts the shares of all experts, and end where
    // those of the next list begin. Behind the last one there is one more, which is never used.
    Listed listed[S::kChunk * S::kPlaces + 1];
    uint16_t begins[kLists + 1];
    uint16_t num[kLists];
    // The experts that some position passes, in ascending order, and those with the most positions
    // first.
    uint16_t experts[S::kExperts];
    uint16_t longest_first[S::kExperts];
    uint32_t num_experts;

    struct List {
        const Listed* positions;
        uint32_t num;
    };
    // Returns `num` neighbouring lists from list `first` on as one.
    KCCL_DECODE List lists(uint32_t first, uint32_t num) const {
        const uint32_t begin = mem::load_plain(begins + first);
        return {listed + begin, mem::load_plain(begins + first + num) - begin};
    }
    KCCL_DECODE List list_of(uint32_t expert) const { return lists(expert * kShares, kShares); }
    KCCL_DECODE List list_of(uint32_t expert, uint32_t share) const {
        return lists(expert * kShares + share, 1);
    }
};

// What the experts' products have in shared memory.
template <class S>
struct ExpertsArea {
    using Down = typename Shape<S>::ExpertDown;
    using Unit = Mma<typename Down::Format::Operand>;

    ChunkChoice<S> choice;
    // [warp]: the sums of a row tile of ExpertDown, as Mma's Lane stores them.
    mem::Line sums[S::kChunkWarps][ChunkChoice<S>::kShare][Unit::kSumsLines];
    // [warp]: the sums of a row tile for a group of positions.
    Float4 rows[S::kChunkWarps][Unit::kVectors][kTileFloat4s];
};

template <class S>
KCCL_DECODE ExpertsArea<S>& experts_area(PrefillConsumer<S>& consumer) {
    return consumer.shared().template in_stages<ExpertsArea<S>>();
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

// Calls f(number, place, before) for each position of a list, in the thread that has it; `before`
// positions come before it. Returns their number. Called by all threads of a warp.
template <class S, class F>
KCCL_DECODE uint32_t for_each_position(const ChunkChoice<S>& choice, uint32_t num, uint32_t list,
                                       F f) {
    using Choice = ChunkChoice<S>;
    const uint32_t expert = list / Choice::kShares, first = list % Choice::kShares * Choice::kShare;
    const uint64_t lower = (uint64_t{1} << warp().index()) - 1;
    uint32_t total = 0;
    for (uint32_t i = 0; i < Choice::kShare; i += platform::kWarpSize) {
        const uint32_t of_share = i + warp().index(), number = first + of_share;
        uint32_t place = S::kPlaces;
        if (of_share < Choice::kShare && number < num) {
            KCCL_UNROLL
            for (uint32_t k = 0; k < S::kPlaces; ++k) {
                if (mem::load_plain(&choice.of[number].expert[k]) == expert) place = k;
            }
        }
        const uint64_t passing = platform::warp_ballot(place < S::kPlaces);
        if (place < S::kPlaces) f(number, place, total + num_bits(passing & lower));
        total += num_bits(passing);
    }
    return total;
}

// Writes where a list begins and, for an expert's first list, the expert, if a position passes it.
template <class S>
KCCL_DECODE void place_list(ChunkChoice<S>& choice, uint32_t list) {
    using Choice = ChunkChoice<S>;
    uint32_t begin = 0, num_before = 0, of_expert = 0;
    for (uint32_t before = 0; before < list; ++before) {
        const uint32_t num = mem::load_plain(&choice.num[before]);
        begin += num;
        of_expert += num;
        if ((before + 1) % Choice::kShares != 0) continue;
        num_before += of_expert != 0 ? 1 : 0;
        of_expert = 0;
    }
    mem::store_plain(&choice.begins[list], static_cast<uint16_t>(begin));
    if (list == Choice::kLists) {
        mem::store_plain(&choice.num_experts, num_before);
        mem::store_plain(&choice.listed[begin].bits, uint16_t{0});
        return;
    }
    for (uint32_t share = 0; share < Choice::kShares; ++share) {
        of_expert += mem::load_plain(&choice.num[list / Choice::kShares * Choice::kShares + share]);
    }
    if (list % Choice::kShares == 0 && of_expert != 0) {
        const uint32_t expert = list / Choice::kShares;
        mem::store_plain(&choice.experts[num_before], static_cast<uint16_t>(expert));
    }
}

// Finds the place of an expert among those with the most positions. Of equal numbers, the lower
// expert's comes first.
template <class S>
KCCL_DECODE void rank_expert(ChunkChoice<S>& choice, uint32_t expert) {
    const uint32_t num = choice.list_of(expert).num;
    if (num == 0) return;
    uint32_t rank = 0;
    for (uint32_t other = 0; other < S::kExperts; ++other) {
        const uint32_t of_other = choice.list_of(other).num;
        rank += of_other > num || (of_other == num && other < expert) ? 1 : 0;
    }
    mem::store_plain(&choice.longest_first[rank], static_cast<uint16_t>(expert));
}

// Chooses the experts of all positions of a chunk, and makes the lists of positions. Called by all
// consumer warps, which have met when it returns.
template <class S>
KCCL_DECODE void choose_chunk(PrefillConsumer<S>& consumer, const PromptChunk& chunk) {
    constexpr uint32_t kLists = ChunkChoice<S>::kLists;
    ChunkChoice<S>& choice = experts_area(consumer).choice;
    for (uint32_t number = consumer.warp_index(); number < chunk.num; number += S::kChunkWarps) {
        choose_position(consumer, number);
    }
    consumer.meet();
    for (uint32_t i = consumer.warp_index(); i < kLists; i += S::kChunkWarps) {
        const auto nothing = [](uint32_t, uint32_t, uint32_t) {};
        const uint32_t num = for_each_position(choice, chunk.num, i, nothing);
        if (leads(warp())) mem::store_plain(&choice.num[i], static_cast<uint16_t>(num));
    }
    consumer.meet();
    for (uint32_t i = consumer.index(); i <= kLists; i += PrefillConsumer<S>::kThreads) {
        place_list(choice, i);
    }
    consumer.meet();
    for (uint32_t i = consumer.warp_index(); i < kLists; i += S::kChunkWarps) {
        Listed* const list = choice.listed + mem::load_plain(&choice.begins[i]);
        for_each_position(choice, chunk.num, i,
                          [&](uint32_t number, uint32_t place, uint32_t before) {
                              const uint32_t bits = number | place << Listed::kPlaceAt;
                              mem::store_plain(&list[before].bits, static_cast<uint16_t>(bits));
                          });
    }
    for (uint32_t i = consumer.index(); i < S::kExperts; i += PrefillConsumer<S>::kThreads) {
        rank_expert(choice, i);
    }
    consumer.meet();
}

}  // namespace kccl::decode
