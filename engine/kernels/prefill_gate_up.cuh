// ExpertGateUp in prefill. The positions of a chunk are grouped by expert, so the weights of each
// expert that some position passes are read once a chunk. The sums have the same bits as in decode.
#pragma once

#include "prefill_expert_batch.cuh"

namespace kccl::decode {

// ExpertGateUp: a warp takes a few row tiles of one expert at a time, with the positions that pass
// the expert. All parts of the columns come in order, as in ChunkMultiplier.
template <class S>
class ChunkGateUp {
  public:
    KCCL_DECODE ChunkGateUp(PrefillConsumer<S>& consumer, uint32_t layer)
        : consumer_(consumer),
          area_(experts_area(consumer)),
          layer_(layer),
          lane_(Unit::kVectors, kTileFloat4s),
          weights_(experts_at(consumer, layer, ExpertMemory<S>::kGateUpAt)) {}

    // Called by all consumer warps, which have met since the choice was written.
    KCCL_DECODE void run() {
        // Neighbouring warps have neighbouring row tiles of the same expert, and all blocks share
        // an expert that many positions pass. The experts with the most positions come first, so
        // that all warps have about as much to do.
        constexpr uint32_t kStride = Shape<S>::kBlocksPerGroup * S::kChunkWarps;
        const uint32_t num = mem::load_plain(&area_.choice.num_experts) * kUnitsOfOne;
        uint32_t unit = consumer_.block_in_group() * S::kChunkWarps + consumer_.warp_index();
        if (unit >= num) return;
        KCCL_UNROLL
        for (uint32_t r = 0; r < kRows; ++r) {
            batches_[r].load_all(lane_, row_of(unit) + r * kRowBytes);
        }
#pragma unroll 1
        for (; unit < num; unit += kStride) {
            const uint8_t* const row = row_of(unit);
            // Behind the last one come its first weights again.
            const uint8_t* const behind = unit + kStride < num ? row_of(unit + kStride) : row;
            const uint32_t positions = area_.choice.list_of(expert_of(unit)).num;
#pragma unroll 1
            for (uint32_t from = 0; from < positions; from += kAtOnce) {
                const bool is_last = from + kAtOnce >= positions;
                multiply(unit, row, is_last ? behind : row, from, positions);
            }
        }
    }

  private:
    using C = ChunkLayout<S>;
    using M = typename Shape<S>::ExpertGateUp;
    using One = typename M::One;
    // A unit is kRows neighbouring row tiles of an expert, which share the vectors that a warp
    // loads. Threads have registers for several if weights have 4 bits.
    static constexpr bool kIsShort = 4 * One::Format::kTileBytes <= kTileBytes;
    static constexpr uint32_t kRows = divisor_of(One::kTiles, kIsShort ? 4 : 1);
    static constexpr uint32_t kUnitsOfOne = One::kTiles / kRows;
    static constexpr uint32_t kRowBytes = One::kSteps * One::kStepBytes;
    using Batch = ExpertBatch<One, kIsShort ? 4608 / kRows : 4096, 8>;
    using Unit = typename Batch::Unit;
    // A warp multiplies at most kGroups groups at a time.
    static constexpr uint32_t kGroups = 2, kAtOnce = kGroups * Unit::kVectors;

    KCCL_DECODE uint32_t expert_of(uint32_t unit) const {
        return mem::load_plain(&area_.choice.longest_first[unit / kUnitsOfOne]);
    }
    KCCL_DECODE const uint8_t* row_of(uint32_t unit) const {
        const uint64_t expert = expert_of(unit) * M::kUnitsOfOne * kUnitBytes<S>;
        return weights_ + expert + uint64_t{unit % kUnitsOfOne} * kRows * kRowBytes;
    }

    // Multiplies a row tile with the positions from number `from` of the expert's list on. Loads
    // the first weights at `behind` for the next call.
    KCCL_DECODE void multiply(uint32_t unit, const uint8_t* row, const uint8_t* behind,
                              uint32_t from, uint32_t positions) {
        const Listed* const list = area_.choice.list_of(expert_of(unit)).positions;
        const uint32_t num_groups = least_of(ceil_div(positions - from, Unit::kVectors), kGroups);
        typename Unit::Gather gathers[kGroups] = {};
        KCCL_UNROLL
        for (uint32_t g = 0; g < kGroups; ++g) {
            if (g >= num_groups) break;
            gathers[g] = lane_.gather([&](uint32_t vector) {
                // Behind the last position it comes again, and its sums are not used.
                const uint32_t i = least_of(from + g * Unit::kVectors + vector, positions - 1);
                const uint32_t number = mem::load_plain(list + i).number();
                const uint32_t slot = C::kMlp + C::Mlp::kNormed + number * kTileFloat4s;
                return reinterpret_cast<const StagedFloat4*>(consumer_.here(slot));
            });
        }
        typename Batch::Inputs inputs[kGroups] = {};
        KCCL_UNROLL
        for (uint32_t g = 0; g < kGroups; ++g) {
            if (g < num_groups) Batch::load(inputs[g], lane_, gathers[g], C::kStripe);
        }
        float totals[kRows][kGroups][Unit::kTotals] = {};
        uint32_t at = 0;
#pragma unroll 1
        for (uint32_t part = 0; part < S::kWarps; ++part) {
            typename Batch::Sums sums[kRows][kGroups] = {};
#pragma unroll 1
            for (uint32_t batch = 0; batch < Batch::kBatchesOfPart; ++batch) {
                const bool ends_part = batch + 1 == Batch::kBatchesOfPart;
                const uint32_t step = (ends_part ? 0 : batch + 1) * Batch::kBatch * Batch::kStrip;
                const bool is_last = ends_part && part + 1 == S::kWarps;
                const uint8_t* const next =
                    is_last ? behind : row + One::strip_at(step, part + (ends_part ? 1 : 0));
                KCCL_UNROLL
                for (uint32_t i = 0; i < Batch::kBatch; i += Batch::kTogether) {
                    // Behind the last tiles come the first ones again.
                    const bool ends_row = is_last && i + Batch::kTogether == Batch::kBatch;
                    at = ends_row ? 0 : at + Batch::kTiles * C::kStripe;
                    KCCL_UNROLL
                    for (uint32_t r = 0; r < kRows; ++r) {
                        const auto operands = batches_[r].operands(i);
                        KCCL_UNROLL
                        for (uint32_t g = 0; g < kGroups; ++g) {
                            if (g >= num_groups) break;
                            const auto behind_these = gathers[g].behind(at);
                            batches_[r].add(sums[r][g], operands, i, inputs[g], [&](uint32_t tile) {
                                // The last row tile makes room for the next vectors.
                                return r + 1 < kRows
                                           ? inputs[g][tile]
                                           : lane_.inputs(behind_these, tile * C::kStripe);
                            });
                        }
                        batches_[r].load(lane_, next + r * kRowBytes, i);
                    }
                }
            }
            KCCL_UNROLL
            for (uint32_t r = 0; r < kRows; ++r) {
                KCCL_UNROLL
                for (uint32_t g = 0; g < kGroups; ++g) {
                    float* total = totals[r][g];
                    lane_.totals(sums[r][g],
                                 [&](uint32_t, uint32_t, float sum) { *total++ += sum; });
                }
            }
        }
        KCCL_UNROLL
        for (uint32_t g = 0; g < kGroups; ++g) {
            if (g >= num_groups) break;
            KCCL_UNROLL
            for (uint32_t r = 0; r < kRows; ++r) {
                auto* const rows = area_.rows[consumer_.warp_index()];
                store_rows(rows, lane_, totals[r][g]);
                const uint32_t vector = warp().index() / kActFloat4s;
                const uint32_t i = warp().index() % kActFloat4s;
                const uint32_t in_list = from + g * Unit::kVectors + vector;
                if (vector < Unit::kVectors && in_list < positions) {
                    store_act(expert_of(unit), unit % kUnitsOfOne * kRows + r,
                              mem::load_plain(list + in_list), i, rows[vector]);
                }
                warp().sync();
            }
        }
    }
    // Half of a tile's rows are rows of the gate, so a tile gives half as many values.
    static constexpr uint32_t kActFloat4s = kTileFloat4s / 2;

    // Stages four values of an expert's hidden vector, times the expert's share.
    KCCL_DECODE void store_act(uint32_t expert, uint32_t tile, Listed listed, uint32_t i,
                               const Float4* rows) {
        const uint32_t number = listed.number(), place = listed.place();
        const float share = mem::load_plain(&area_.choice.of[number].share[place]);
        const float inverse = scale_of(consumer_, number);
        const Float4 gate = scaled_row(expert, tile, i, rows, inverse);
        const Float4 up = scaled_row(expert, tile, i + kActFloat4s, rows, inverse);
        Float4 act;
        KCCL_UNROLL
        for (int j = 0; j < 4; ++j) {
            const float whole = untagged(activated<S>(gate.value[j], up.value[j]));
            act.value[j] = rounded_product(whole, share);
        }
        const uint32_t lane = tile / M::kTilesOfPlace;
        const uint32_t index4 = tile % M::kTilesOfPlace * kActFloat4s + i;
        const uint32_t vector = (consumer_.first_lane_here() + lane) * S::kPlaces + place;
        const uint32_t slot =
            C::kActs + vector * C::Mlp::kTilesOfActs * C::kStripe + C::at(index4, number);
        using Operand = typename Shape<S>::ExpertDown::Format::Operand;
        mem::store_plain(reinterpret_cast<StagedFloat4*>(consumer_.here(slot)),
                         split<Operand>(act));
    }
    KCCL_DECODE Float4 scaled_row(uint32_t expert, uint32_t tile, uint32_t i, const Float4* rows,
                                  float factor) const {
        Float4 sums = mem::load_plain(rows + i);
        for (float& value : sums.value) value = rounded_product(value, factor);
        if constexpr (kHasExpertBiases<S>) {
            const uint64_t first =
                biases_of_expert<M, S>(Product<S>::kExpertGateUp, layer_, expert);
            const Float4 bias =
                load_float4(consumer_.task().biases, first + tile * kTileFloat4s + i);
            KCCL_UNROLL
            for (int j = 0; j < 4; ++j) sums.value[j] += bias.value[j];
        }
        return sums;
    }

    PrefillConsumer<S>& consumer_;
    ExpertsArea<S>& area_;
    const uint32_t layer_;
    const typename Unit::Lane lane_;
    const uint8_t* const weights_;
    Batch batches_[kRows];  // the next weights
};

}  // namespace kccl::decode
