// A product of a block's weights with the vectors of a chunk. The sums have the same bits as in
// decode. There each warp multiplies a part of the columns, and the warps' sums are added up in
// order. Here one warp goes through all these parts in order, for its row tile.
//
// Weights go from memory to registers, because one warp, or few, needs each tile. Vectors go
// through a ring in shared memory, because all warps need them.
#pragma once

#include "prefill_warps.cuh"

namespace kccl::decode {

template <class M, class S>
class ChunkMultiplier {
  public:
    KCCL_DECODE ChunkMultiplier(PrefillConsumer<S>& consumer, const uint8_t* weights,
                                uint32_t num_tiles)
        : consumer_(consumer),
          lane_(Unit::kVectors, kTileFloat4s),
          weights_(weights),
          num_items_(num_tiles * Plan::kParts) {}

    // Computes the sums and leaves them in shared().totals. Called by all consumer warps. They must
    // meet before they read the sums.
    KCCL_DECODE void run() {
        for (uint32_t lane = 0; lane < M::kLanes; ++lane) {
            for (uint32_t first = 0; first < num_items_; first += S::kChunkWarps) {
                const uint32_t item = first + consumer_.warp_index();
                if (item < num_items_) {
                    multiply(item / Plan::kParts * M::kLanes + lane, item % Plan::kParts);
                } else {
                    skip();
                }
            }
        }
    }

  private:
    using Plan = ChunkPlan<S, M>;
    using F = typename M::Format;
    using Unit = Mma<typename F::Operand>;
    static constexpr uint32_t kRun = Plan::kRun;
    // The number of runs in a part of the columns.
    static constexpr uint32_t kRunsOfPart = M::kSteps / kRun;
    // A strip has several runs, or a run has several strips.
    static constexpr uint32_t kStrip = F::kStripTiles;
    static constexpr uint32_t kRunsOfStrip = kStrip > kRun ? kStrip / kRun : 1;
    static constexpr uint32_t kStripsOfRun = kStrip > kRun ? 1 : kRun / kStrip;
    static constexpr uint32_t kChain = ChainOf<F>::kTiles;
    static constexpr uint32_t kRunsOfChain = kChain > kRun ? kChain / kRun : 1;
    // How many multiplications a run has, and how many ahead of its own the part of a vector is
    // loaded. If that is left to the compiler and registers are short, it loads each part only when
    // the multiplication before has read its own. With scales, registers are too few for more.
    static constexpr uint32_t kMultiplications = kRun * Plan::kEach;
    static constexpr uint32_t kAhead = kHasScales<F> ? 0 : least_of(2, kMultiplications);

    // The weights of a run.
    template <bool HAS_SCALES = kHasScales<F>, int = 0>
    struct Run {
        KCCL_DECODE auto operand(uint32_t i) const { return F::operand(tiles[i]); }
        typename F::Stored tiles[kRun];
    };
    template <int I>
    struct Run<true, I> {
        KCCL_DECODE const typename F::Scales& scales_of(uint32_t i) const {
            return scales[i / kStrip % kStripsOfRun];
        }
        KCCL_DECODE auto operand(uint32_t i) const { return F::operand(tiles[i], scales_of(i)); }
        typename F::Stored tiles[kRun];
        typename F::Scales scales[kStripsOfRun];
    };

    KCCL_DECODE void skip() {
        for (uint32_t run = 0; run < Plan::kRuns; ++run) {
            (void)consumer_.vectors().await_front();
            consumer_.vectors().pop();
        }
    }

    // Multiplies a row tile and lane with the vectors of a part.
    KCCL_DECODE void multiply(uint32_t tile, uint32_t part) {
        const uint8_t* const row = weights_ + uint64_t{tile} * M::kSteps * M::kStepBytes;
        // The sums are kept in registers. In shared memory they would take as much of its time as
        // the vectors of a short product.
        float totals[Plan::kEach][Unit::kTotals] = {};
        Run<> now;
        KCCL_UNROLL
        for (uint32_t i = 0; i < kRun; ++i) load(now, row, 0, i);
        uint32_t run = 0;
#pragma unroll 1
        for (uint32_t of_columns = 0; of_columns < S::kWarps; ++of_columns) {
            typename SumsOf<F>::Type sums[Plan::kEach] = {};
            // With scales: the sums of a chain.
            typename Unit::Sums parts[kHasScales<F> ? Plan::kEach : 1] = {};
            // With minimums: the sums of the vectors.
            [[maybe_unused]] typename Unit::Sums lowered[F::kHasMinimums ? Plan::kEach : 1] = {};
#pragma unroll 1
            for (uint32_t left = kRunsOfPart; left > 0; --left) {
                // Each tile is loaded when the tile of the run before has been multiplied.
                const bool has_next = ++run < Plan::kRuns;
                if (run + 1 < Plan::kRuns) prefetch(row, run + 1);
                const auto* const vectors =
                    reinterpret_cast<const StagedFloat4*>(consumer_.vectors().await_front()) +
                    part * kVectors * kTileFloat4s;
                [[maybe_unused]] typename Unit::Inputs ahead[kAhead == 0 ? 1 : kAhead] = {};
                if constexpr (kAhead != 0) {
                    KCCL_UNROLL
                    for (uint32_t i = 0; i < kAhead; ++i) ahead[i] = inputs(vectors, i);
                }
                KCCL_UNROLL
                for (uint32_t i = 0; i < kRun; ++i) {
                    const auto tile = now.operand(i);
                    KCCL_UNROLL
                    for (uint32_t k = 0; k < Plan::kEach; ++k) {
                        const uint32_t number = i * Plan::kEach + k;
                        if constexpr (F::kHasMinimums) {
                            const auto input = inputs(vectors, number);
                            Unit::multiply(parts[k], tile, input);
                            Unit::multiply(lowered[k], F::ones(), input);
                        } else if constexpr (kHasScales<F>) {
                            Unit::multiply(parts[k], tile, inputs(vectors, number));
                        } else {
                            const auto input = ahead[number % kAhead];
                            if (number + kAhead < kMultiplications) {
                                ahead[number % kAhead] = inputs(vectors, number + kAhead);
                            }
                            Unit::multiply(sums[k], tile, input);
                        }
                    }
                    if constexpr (F::kHasMinimums) {
                        add_chains<F>(sums, parts, lowered, now, i);
                    } else if constexpr (kHasScales<F>) {
                        const bool ends_chain =
                            kRunsOfChain > 1 ? i + 1 == kRun && (left - 1) % kRunsOfChain == 0
                                             : (i + 1) % kChain == 0;
                        if (ends_chain) {
                            KCCL_UNROLL
                            for (uint32_t k = 0; k < Plan::kEach; ++k) {
                                Unit::add_scaled(sums[k], parts[k], now.scales_of(i).factors);
                                parts[k] = {};
                            }
                        }
                    }
                    if (has_next) load(now, row, run, i);
                }
                consumer_.vectors().pop();
            }
            KCCL_UNROLL
            for (uint32_t k = 0; k < Plan::kEach; ++k) {
                float* total = totals[k];
                lane_.totals(sums[k], [&](uint32_t, uint32_t, float sum) { *total++ += sum; });
            }
        }
        store(totals, tile, part);
    }

    // Adds the chains that end with tile i of a run, and clears them.
    template <class FORMAT>
    KCCL_DECODE static void add_chains(typename SumsOf<FORMAT>::Type (&sums)[Plan::kEach],
                                       typename Unit::Sums (&parts)[Plan::kEach],
                                       typename Unit::Sums (&lowered)[Plan::kEach],
                                       const Run<>& now, uint32_t i) {
        constexpr uint32_t kLowered = FORMAT::kLoweredTiles;
        static_assert(kRun % kLowered == 0, "a run has whole chains");
        const uint32_t of_strip = i % kStrip;
        KCCL_UNROLL
        for (uint32_t k = 0; k < Plan::kEach; ++k) {
            if ((i + 1) % kChain == 0) {
                Unit::add_scaled(sums[k], parts[k],
                                 FORMAT::scale(now.scales_of(i), of_strip / kChain));
                parts[k] = {};
            }
            if ((i + 1) % kLowered == 0) {
                Unit::add_scaled(sums[k], lowered[k],
                                 FORMAT::minimum(now.scales_of(i), of_strip / kLowered));
                lowered[k] = {};
            }
        }
    }

    KCCL_DECODE void store(const float (&totals)[Plan::kEach][Unit::kTotals], uint32_t tile,
                           uint32_t part) const {
        auto* const all = reinterpret_cast<float*>(consumer_.shared().totals) +
                          (tile * S::kChunk + part * kVectors) * kTileRows;
        KCCL_UNROLL
        for (uint32_t k = 0; k < Plan::kEach; ++k) {
            const float* total = totals[k];
            lane_.for_each_place([&](uint32_t of_tile, uint32_t vector) {
                const float sum = *total++;
                if (of_tile >= kTileRows) return;
                mem::store_plain(all + (k * Unit::kVectors + vector) * kTileRows + of_tile, sum);
            });
        }
    }

    // Loads the vectors' part for a multiplication of a run. number: counts the multiplications of
    // all tiles.
    KCCL_DECODE typename Unit::Inputs inputs(const StagedFloat4* vectors, uint32_t number) const {
        const uint32_t tile = number / Plan::kEach, k = number % Plan::kEach;
        return lane_.inputs(vectors + tile * ChunkLayout<S>::kStripe +
                            k * Unit::kVectors * kTileFloat4s);
    }

    // Loads tile i of a run, and behind a strip's last tile its scales. row: all parts of the
    // columns.
    KCCL_DECODE void load(Run<>& to, const uint8_t* row, uint32_t run, uint32_t i) const {
        const uint8_t* const first = row + offset_of(run);
        to.tiles[i] = F::load(lane_, first + tile_of_run(i));
        if constexpr (kHasScales<F>) {
            if ((i + 1) % least_of(kStrip, kRun) != 0) return;
            // In the strip, the run's first tile may have others before it.
            const uint32_t before = run % kRunsOfStrip * kRun;
            const uint8_t* const last = first + tile_of_run(i + 1 - least_of(kStrip, kRun));
            to.scales[i / kStrip % kStripsOfRun] =
                F::scales(lane_, last + (kStrip - before) * F::kTileBytes);
            if constexpr (F::kHasMinimums && kRunsOfStrip > 1) F::skip(to.scales[0], before);
        }
    }

    // The offset of a run's first tile within a row that has all parts of the columns.
    KCCL_DECODE static uint64_t offset_of(uint32_t run) {
        const uint32_t step = run % kRunsOfPart * kRun, of_strip = step % kStrip;
        return uint64_t{step - of_strip} * M::kStepBytes + of_strip * F::kTileBytes +
               run / kRunsOfPart * kStripBytes<F>;
    }
    // The offset of tile i behind the run's first one.
    KCCL_CONSTEXPR static uint32_t tile_of_run(uint32_t i) {
        if (kStrip > kRun) return i * F::kTileBytes;
        return i / kStrip * (S::kWarps * kStripBytes<F>)+i % kStrip * F::kTileBytes;
    }

    // Begins to load a run's weights.
    KCCL_DECODE static void prefetch(const uint8_t* row, uint32_t run) {
        const uint8_t* const first = row + offset_of(run);
        constexpr uint32_t kLines = ceil_div(F::kTileBytes, kKcclLineBytes);
        for (uint32_t i = warp().index(); i < kRun * kLines; i += platform::kWarpSize) {
            mem::prefetch(first + tile_of_run(i / kLines) + i % kLines * kKcclLineBytes);
        }
    }

    // Vectors of a part.
    static constexpr uint32_t kVectors = Plan::kEach * Unit::kVectors;

    PrefillConsumer<S>& consumer_;
    const typename Unit::Lane lane_;
    const uint8_t* const weights_;
    const uint32_t num_items_;
};

// Where the weights of the block's rows begin.
template <class S>
KCCL_DECODE const uint8_t* weights_of(PrefillConsumer<S>& consumer, Product<S> product,
                                      uint32_t layer) {
    using Dims = Shape<S>;
    const uint64_t unit = Dims::stream_of(consumer.block()) +
                          layer * Dims::packed_by(consumer.block_in_group()) +
                          packed_before<S>(product, consumer.block_in_group());
    return reinterpret_cast<const uint8_t*>(consumer.task().weights) + unit * kUnitBytes<S>;
}

// Begins to load the first weights of a row tile; each warp loads others. Called while the block
// does other work, so that the memory stays busy.
template <class M, class S>
KCCL_DECODE void prefetch_weights(PrefillConsumer<S>& consumer, Product<S> product,
                                  uint32_t layer) {
    constexpr uint32_t kAhead = 8 < M::kSteps * S::kWarps ? 8 : M::kSteps * S::kWarps;
    constexpr uint32_t kLines = ceil_div(M::Format::kTileBytes, kKcclLineBytes);
    const uint32_t mine = consumer.warp_index();
    if (mine >= M::tiles_of(consumer.block_in_group()).num) return;
    const uint8_t* const row = weights_of(consumer, product, layer) +
                               uint64_t{mine} * M::kLanes * M::kSteps * M::kStepBytes;
    for (uint32_t i = warp().index(); i < kAhead * kLines; i += platform::kWarpSize) {
        const uint32_t tile = i / kLines;
        mem::prefetch(row + M::tile_at(tile % M::kSteps, tile / M::kSteps) +
                      i % kLines * kKcclLineBytes);
    }
}

// One product of the block, in a layer.
template <class M, class S>
KCCL_DECODE void multiply_chunk(PrefillConsumer<S>& consumer, Product<S> product, uint32_t layer) {
    ChunkMultiplier<M, S> multiplier(consumer, weights_of(consumer, product, layer),
                                     M::tiles_of(consumer.block_in_group()).num);
    multiplier.run();
}

// Returns the sums of four rows, for a position: float4 `index4` of row tile and lane `tile`.
template <class S>
KCCL_DECODE Float4 total_of(PrefillConsumer<S>& consumer, uint32_t tile, uint32_t number,
                            uint32_t index4) {
    return mem::load_plain(consumer.shared().totals + (tile * S::kChunk + number) * kTileFloat4s +
                           index4);
}

}  // namespace kccl::decode
