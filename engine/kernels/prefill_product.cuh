// A product of a block's weights with the vectors of a chunk. The sums have the same bits as in
// decode. There each warp multiplies a part of the columns, and the warps' sums are added up in
// order. Here one warp goes through all these parts in order, for its row tiles.
//
// Weights go from memory to registers, because one warp, or few, needs each tile. Vectors go
// through a ring in shared memory, because all warps need them.
#pragma once

#include "prefill_warps.cuh"
#include "residual.cuh"

namespace kccl::decode {

// Where the weights of a row tile of the lane group's blocks begin. They lie in the weight stream
// of the block that has the row tile in decode.
template <class M, class S>
KCCL_DECODE const uint8_t* row_of(PrefillConsumer<S>& consumer, Product<S> product, uint32_t layer,
                                  uint32_t tile) {
    using Dims = Shape<S>;
    const uint32_t owner = kHasSquads<S> ? M::owner_of(tile) : consumer.block_in_group();
    const uint64_t unit = Dims::stream_of(Dims::block_of(consumer.lane_group(), owner)) +
                          layer * Dims::packed_by(owner) + packed_before<S>(product, owner);
    return reinterpret_cast<const uint8_t*>(consumer.task().weights) + unit * kUnitBytes<S> +
           uint64_t{tile - M::first_of(owner)} * M::kLanes * M::kSteps * M::kStepBytes;
}

// Whether a warp adds up the messages of all lanes: where a module's outputs need no other block.
template <class S, class M>
constexpr bool kAddsLanes = kHasSquads<S> && M::kLanes > 1;

template <class M, class S>
class ChunkMultiplier {
  public:
    KCCL_DECODE ChunkMultiplier(PrefillConsumer<S>& consumer, Product<S> product, uint32_t layer)
        : consumer_(consumer),
          lane_(Unit::kVectors, kTileFloat4s),
          product_(product),
          layer_(layer) {}

    // Computes the sums of a round's row tiles and leaves them in shared().totals. Called by all
    // consumer warps. They must meet before they read the sums, and before the next round.
    KCCL_DECODE void run(const Cut& tiles) {
        const uint32_t num_items = ceil_div(tiles.num, Plan::kRows) * Plan::kParts;
        if constexpr (kAddsLanes<S, M>) {
            const uint32_t item = consumer_.warp_index();
            Totals sum = {};
            for (uint32_t lane = 0; lane < M::kLanes && num_items != 0; ++lane) {
                if (item < num_items) {
                    Totals totals = {};
                    multiply(tiles, item, lane, totals);
                    add_message(sum, totals, lane == 0);
                } else {
                    skip();
                }
            }
            if (item < num_items) store(sum, item, 0);
            return;
        }
        for (uint32_t lane = 0; lane < M::kLanes; ++lane) {
            for (uint32_t first = 0; first < num_items; first += S::kChunkWarps) {
                const uint32_t item = first + consumer_.warp_index();
                if (item < num_items) {
                    // They are kept in registers. In shared memory they would take as much of its
                    // time as the vectors of a short product.
                    Totals totals = {};
                    multiply(tiles, item, lane, totals);
                    store(totals, item, lane);
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
    static constexpr uint32_t kRun = Plan::kRun, kRows = Plan::kRows, kEach = Plan::kEach;
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
    static constexpr uint32_t kMultiplications = kRun * kEach;
    static constexpr uint32_t kAhead = kHasScales<F> ? 0 : least_of(2, kMultiplications);
    struct Totals {
        float of[kRows][kEach][Unit::kTotals];
    };

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

    // Multiplies the row tiles and a lane of an item with the vectors of its part.
    KCCL_DECODE void multiply(const Cut& tiles, uint32_t item, uint32_t lane, Totals& totals) {
        const uint8_t* rows[kRows];
        Run<> now[kRows];
        KCCL_UNROLL
        for (uint32_t r = 0; r < kRows; ++r) {
            // Behind the last row tile it comes again, and its sums are not used.
            const uint32_t tile = least_of(item / Plan::kParts * kRows + r, tiles.num - 1);
            rows[r] = row_of<M>(consumer_, product_, layer_, tiles.first + tile) +
                      uint64_t{lane} * M::kSteps * M::kStepBytes;
        }
        KCCL_UNROLL
        for (uint32_t i = 0; i < kRun; ++i) {
            KCCL_UNROLL
            for (uint32_t r = 0; r < kRows; ++r) load(now[r], rows[r], 0, i);
        }
        uint32_t run = 0;
#pragma unroll 1
        for (uint32_t of_columns = 0; of_columns < S::kWarps; ++of_columns) {
            typename SumsOf<F>::Type sums[kRows][kEach] = {};
            // With scales: the sums of a chain.
            typename Unit::Sums parts[kHasScales<F> ? kRows : 1][kHasScales<F> ? kEach : 1] = {};
            // With minimums: the sums of the vectors.
            [[maybe_unused]]
            typename Unit::Sums lowered[F::kHasMinimums ? kRows : 1][F::kHasMinimums ? kEach : 1] =
                {};
#pragma unroll 1
            for (uint32_t left = kRunsOfPart; left > 0; --left) {
                // Each tile is loaded when the tile of the run before has been multiplied.
                const bool has_next = ++run < Plan::kRuns;
                if (run + 1 < Plan::kRuns) {
                    KCCL_UNROLL
                    for (uint32_t r = 0; r < kRows; ++r) prefetch(rows[r], run + 1);
                }
                const auto* const vectors =
                    reinterpret_cast<const StagedFloat4*>(consumer_.vectors().await_front()) +
                    item % Plan::kParts * kVectors * kTileFloat4s;
                [[maybe_unused]] typename Unit::Inputs ahead[kAhead == 0 ? 1 : kAhead] = {};
                if constexpr (kAhead != 0) {
                    KCCL_UNROLL
                    for (uint32_t i = 0; i < kAhead; ++i) ahead[i] = inputs(vectors, i);
                }
                KCCL_UNROLL
                for (uint32_t i = 0; i < kRun; ++i) {
                    typename Unit::Weights operands[kRows];
                    KCCL_UNROLL
                    for (uint32_t r = 0; r < kRows; ++r) operands[r] = now[r].operand(i);
                    KCCL_UNROLL
                    for (uint32_t k = 0; k < kEach; ++k) {
                        const uint32_t number = i * kEach + k;
                        if constexpr (kHasScales<F>) {
                            const auto input = inputs(vectors, number);
                            KCCL_UNROLL
                            for (uint32_t r = 0; r < kRows; ++r) {
                                Unit::multiply(parts[r][k], operands[r], input);
                                if constexpr (F::kHasMinimums) {
                                    Unit::multiply(lowered[r][k], F::ones(), input);
                                }
                            }
                        } else {
                            const auto input = ahead[number % kAhead];
                            if (number + kAhead < kMultiplications) {
                                ahead[number % kAhead] = inputs(vectors, number + kAhead);
                            }
                            KCCL_UNROLL
                            for (uint32_t r = 0; r < kRows; ++r) {
                                Unit::multiply(sums[r][k], operands[r], input);
                            }
                        }
                    }
                    KCCL_UNROLL
                    for (uint32_t r = 0; r < kRows; ++r) {
                        if constexpr (F::kHasMinimums) {
                            add_chains<F>(sums[r], parts[r], lowered[r], now[r], i);
                        } else if constexpr (kHasScales<F>) {
                            const bool ends_chain =
                                kRunsOfChain > 1 ? i + 1 == kRun && (left - 1) % kRunsOfChain == 0
                                                 : (i + 1) % kChain == 0;
                            if (ends_chain) add_chain(sums[r], parts[r], now[r].scales_of(i));
                        }
                        if (has_next) load(now[r], rows[r], run, i);
                    }
                }
                consumer_.vectors().pop();
            }
            KCCL_UNROLL
            for (uint32_t r = 0; r < kRows; ++r) {
                KCCL_UNROLL
                for (uint32_t k = 0; k < kEach; ++k) {
                    float* total = totals.of[r][k];
                    lane_.totals(sums[r][k],
                                 [&](uint32_t, uint32_t, float sum) { *total++ += sum; });
                }
            }
        }
    }

    // Adds the sums of a chain, and clears them.
    template <class SCALES>
    KCCL_DECODE static void add_chain(typename SumsOf<F>::Type (&sums)[kEach],
                                      typename Unit::Sums (&parts)[kEach], const SCALES& scales) {
        KCCL_UNROLL
        for (uint32_t k = 0; k < kEach; ++k) {
            Unit::add_scaled(sums[k], parts[k], scales.factors);
            parts[k] = {};
        }
    }

    // Adds the chains that end with tile i of a run, and clears them.
    template <class FORMAT>
    KCCL_DECODE static void add_chains(typename SumsOf<FORMAT>::Type (&sums)[kEach],
                                       typename Unit::Sums (&parts)[kEach],
                                       typename Unit::Sums (&lowered)[kEach], const Run<>& now,
                                       uint32_t i) {
        constexpr uint32_t kLowered = FORMAT::kLoweredTiles;
        static_assert(kRun % kLowered == 0, "a run has whole chains");
        const uint32_t of_strip = i % kStrip;
        KCCL_UNROLL
        for (uint32_t k = 0; k < kEach; ++k) {
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

    // Adds a lane's totals, as its message has them, to the sum of the lanes before it.
    KCCL_DECODE static void add_message(Totals& sum, const Totals& totals, bool is_first) {
        KCCL_UNROLL
        for (uint32_t r = 0; r < kRows; ++r) {
            KCCL_UNROLL
            for (uint32_t k = 0; k < kEach; ++k) {
                KCCL_UNROLL
                for (uint32_t i = 0; i < Unit::kTotals; ++i) {
                    const float sent = as_message<S>(totals.of[r][k][i]);
                    sum.of[r][k][i] = is_first ? sent : sum.of[r][k][i] + sent;
                }
            }
        }
    }

    // Returns where the sum of a row is. r, k: which of the item's row tiles, and of its
    // multiplications by a tile. vector, row: which sum of that multiplication.
    KCCL_DECODE float* total_at(uint32_t item, uint32_t lane, uint32_t r, uint32_t k,
                                uint32_t vector, uint32_t row) const {
        constexpr uint32_t kLanes = kAddsLanes<S, M> ? 1 : M::kLanes;
        const uint32_t tile = (item / Plan::kParts * kRows + r) * kLanes + lane;
        const uint32_t number = (item % Plan::kParts * kEach + k) * Unit::kVectors + vector;
        return reinterpret_cast<float*>(consumer_.shared().totals +
                                        ChunkLayout<S>::total_at(tile, number, row / 4)) +
               row % 4;
    }
    KCCL_DECODE void store(const Totals& totals, uint32_t item, uint32_t lane) const {
        KCCL_UNROLL
        for (uint32_t r = 0; r < kRows; ++r) {
            KCCL_UNROLL
            for (uint32_t k = 0; k < kEach; ++k) {
                const float* total = totals.of[r][k];
                lane_.for_each_place([&](uint32_t row, uint32_t vector) {
                    const float sum = *total++;
                    if (row >= kTileRows) return;
                    mem::store_plain(total_at(item, lane, r, k, vector, row), sum);
                });
            }
        }
    }

    // Loads the vectors' part for a multiplication of a run. number: counts the multiplications of
    // all tiles.
    KCCL_DECODE typename Unit::Inputs inputs(const StagedFloat4* vectors, uint32_t number) const {
        const uint32_t tile = number / kEach, k = number % kEach;
        return lane_.inputs(vectors + tile * ChunkLayout<S>::kStripe +
                            k * Unit::kVectors * kTileFloat4s);
    }

    // Loads tile i of a run, and behind a strip's last tile its scales. row: all parts of the
    // columns.
    KCCL_DECODE void load(Run<>& to, const uint8_t* row, uint32_t run, uint32_t i) const {
        const uint8_t* const first = row + offset_of(run);
        if constexpr (kHasTwins<F>) {
            const uint32_t twin = (run % kRunsOfStrip * kRun + i) % kStrip;
            const auto both = load_twins<F>(lane_, first + tile_of_run(i) - twin * F::kTileBytes);
            to.tiles[i] = twin == 0 ? both.tile[0] : both.tile[1];
        } else {
            to.tiles[i] = F::load(lane_, first + tile_of_run(i));
        }
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
    static constexpr uint32_t kVectors = kEach * Unit::kVectors;

    PrefillConsumer<S>& consumer_;
    const typename Unit::Lane lane_;
    const Product<S> product_;
    const uint32_t layer_;
};

// Begins to load the first weights of a row tile; each warp loads others. Called while the block
// does other work, so that the memory stays busy.
template <class M, class S>
KCCL_DECODE void prefetch_weights(PrefillConsumer<S>& consumer, Product<S> product,
                                  uint32_t layer) {
    constexpr uint32_t kAhead = 8 < M::kSteps * S::kWarps ? 8 : M::kSteps * S::kWarps;
    constexpr uint32_t kLines = ceil_div(M::Format::kTileBytes, kKcclLineBytes);
    constexpr uint32_t kRows = ChunkPlan<S, M>::kRows;
    const uint32_t group = consumer.warp_index() / (kHasSquads<S> ? ChunkPlan<S, M>::kParts : 1);
    const Cut tiles = consumer.template tiles<M>();
    for (uint32_t r = 0; r < kRows; ++r) {
        const uint32_t mine = group * kRows + r;
        if (mine >= tiles.num) return;
        const uint8_t* const row = row_of<M>(consumer, product, layer, tiles.first + mine);
        for (uint32_t i = warp().index(); i < kAhead * kLines; i += platform::kWarpSize) {
            const uint32_t tile = i / kLines;
            mem::prefetch(row + M::tile_at(tile % M::kSteps, tile / M::kSteps) +
                          i % kLines * kKcclLineBytes);
        }
    }
}

// Returns the sums of four rows, for a position: float4 `index4` of row tile and lane `tile`.
template <class S>
KCCL_DECODE Float4 total_of(PrefillConsumer<S>& consumer, uint32_t tile, uint32_t number,
                            uint32_t index4) {
    return mem::load_plain(consumer.shared().totals +
                           ChunkLayout<S>::total_at(tile, number, index4));
}

}  // namespace kccl::decode
