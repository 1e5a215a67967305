// How a warp multiplies an expert's weights in prefill: it takes them from memory into registers,
// and vectors from the exchange buffer. Other warps of the block need the same vectors at about the
// same time, so most of them come from the multiprocessor's cache. A multiplication takes a group
// of Mma::kVectors positions.
#pragma once

#include "experts.cuh"
#include "prefill_choice.cuh"

namespace kccl::decode {

// Returns the largest divisor of `total` that is at most `most`, or 1.
KCCL_CONSTEXPR uint32_t divisor_of(uint32_t total, uint32_t most) {
    uint32_t divisor = most < total ? most_of(most, 1) : total;
    while (total % divisor != 0) --divisor;
    return divisor;
}

// How a warp takes an expert's weights: strips of one row tile and part of the columns, kBatch at a
// time. ONE: an expert's matrix. BYTES: the most bytes of a batch, which the warp's threads hold in
// registers. TILES: the most tiles that are multiplied together.
template <class ONE, uint32_t BYTES, uint32_t TILES>
struct ExpertBatch {
    using F = typename ONE::Format;
    using Unit = Mma<typename F::Operand>;
    using Sums = typename SumsOf<F>::Type;
    static_assert(!F::kHasMinimums, "experts have no such format");
    static constexpr uint32_t kStrip = F::kStripTiles, kStripsOfPart = ONE::kSteps / kStrip;
    static constexpr uint32_t kBatch = divisor_of(kStripsOfPart, BYTES / kStripBytes<F>);
    static constexpr uint32_t kBatchesOfPart = kStripsOfPart / kBatch;
    // The strips that are multiplied together, and their tiles.
    static constexpr uint32_t kTogether = divisor_of(kBatch, TILES / kStrip);
    static constexpr uint32_t kTiles = kTogether * kStrip;

    // Loads kTogether strips from strip `first` of a batch on. from: the batch's first strip.
    KCCL_DECODE void load(const typename Unit::Lane& lane, const uint8_t* from, uint32_t first) {
        KCCL_UNROLL
        for (uint32_t i = 0; i < kTogether; ++i) {
            strips_[first + i] = load_strip<F>(lane, from + (first + i) * ONE::kStepBytes * kStrip);
        }
    }
    KCCL_DECODE void load_all(const typename Unit::Lane& lane, const uint8_t* from) {
        KCCL_UNROLL
        for (uint32_t first = 0; first < kBatch; first += kTogether) load(lane, from, first);
    }

    // The tiles of kTogether strips, as the matrix unit takes them.
    struct Operands {
        typename Unit::Weights tile[kTiles];
    };
    KCCL_DECODE Operands operands(uint32_t first) const {
        Operands operands;
        KCCL_UNROLL
        for (uint32_t i = 0; i < kTiles; ++i) {
            const Strip<F>& strip = strips_[first + i / kStrip];
            if constexpr (kHasScales<F>) {
                operands.tile[i] = F::operand(strip.tiles[i % kStrip], strip.scales);
            } else {
                operands.tile[i] = F::operand(strip.tiles[0]);
            }
        }
        return operands;
    }

    // The tiles of a group of vectors that kTogether strips are multiplied with.
    using Inputs = typename Unit::Inputs[kTiles];
    // gather: where the first tile is. stripe: the float4s of a tile.
    KCCL_DECODE static void load(Inputs& inputs, const typename Unit::Lane& lane,
                                 const typename Unit::Gather& gather, uint32_t stripe) {
        KCCL_UNROLL
        for (uint32_t i = 0; i < kTiles; ++i) inputs[i] = lane.inputs(gather, i * stripe);
    }

    // Adds the products of kTogether strips with a group of vectors to the group's sums. Tile i of
    // the inputs becomes next(i) when it has been multiplied, so that it is on its way while others
    // are multiplied.
    template <class Next>
    KCCL_DECODE void add(Sums& sums, const Operands& operands, uint32_t first, Inputs& inputs,
                         Next next) const {
        if constexpr (kHasScales<F>) {
            constexpr uint32_t kChain = ChainOf<F>::kTiles, kChains = kTiles / kChain;
            typename Unit::Sums chains[kChains] = {};
            KCCL_UNROLL
            for (uint32_t i = 0; i < kChain; ++i) {
                KCCL_UNROLL
                for (uint32_t k = 0; k < kChains; ++k) {
                    const uint32_t tile = k * kChain + i;
                    Unit::multiply(chains[k], operands.tile[tile], inputs[tile]);
                    inputs[tile] = next(tile);
                }
            }
            KCCL_UNROLL
            for (uint32_t k = 0; k < kChains; ++k) {
                Unit::add_scaled(sums, chains[k],
                                 strips_[first + k * kChain / kStrip].scales.factors);
            }
        } else {
            KCCL_UNROLL
            for (uint32_t i = 0; i < kTiles; ++i) {
                Unit::multiply(sums, operands.tile[i], inputs[i]);
                inputs[i] = next(i);
            }
        }
    }

  private:
    Strip<F> strips_[kBatch];
};

// Where the experts' matrices of a product begin, in a layer. in_layer: in units of kUnitBytes.
template <class S>
KCCL_DECODE const uint8_t* experts_at(PrefillConsumer<S>& consumer, uint32_t layer,
                                      uint64_t in_layer) {
    const uint64_t unit =
        Shape<S>::stream_of(S::kBlocks) + layer * ExpertMemory<S>::kLayer + in_layer;
    return reinterpret_cast<const uint8_t*>(consumer.task().weights) + unit * kUnitBytes<S>;
}

// Stores the sums of a row tile and group of positions as [position][row]. Called by all threads of
// a warp, each of which passes its sums; they meet.
template <class LANE, uint32_t NUM>
KCCL_DECODE void store_rows(Float4 (*rows)[kTileFloat4s], const LANE& lane,
                            const float (&totals)[NUM]) {
    const float* total = totals;
    lane.for_each_place([&](uint32_t row, uint32_t vector) {
        const float sum = *total++;
        if (row >= kTileRows) return;
        mem::store_plain(reinterpret_cast<float*>(rows[vector]) + row, sum);
    });
    warp().sync();
}

}  // namespace kccl::decode
