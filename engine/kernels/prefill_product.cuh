// A product of a block's weights with the vectors of a chunk. The sums have the bits of decode,
// where each warp multiplies a part of the columns and the warps' sums are added up in their order:
// here a warp goes through all those parts, one after another, for its row tile.
//
// Weights go from memory to registers, because each tile is for one warp, or few. The vectors come
// through a ring, for all warps.
#pragma once

#include "prefill_crew.cuh"

namespace kccl::decode {

template <class M, class S>
class ChunkMultiplier {
  public:
    KCCL_DEVICE ChunkMultiplier(Crew<S>& crew, const uint8_t* weights, uint32_t num_tiles)
        : crew_(crew),
          lane_(Unit::kVectors, kTileQuads),
          weights_(weights),
          num_items_(num_tiles * Plan::kParts) {}

    // Leaves the sums in shared().totals. Called by all warps of the crew; they meet before they
    // read them.
    KCCL_DEVICE void run() {
        for (uint32_t lane = 0; lane < M::kLanes; ++lane) {
            for (uint32_t first = 0; first < num_items_; first += S::kChunkWarps) {
                const uint32_t item = first + crew_.warp_index();
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
    using Unit = Mma<typename S::Weight>;
    static constexpr uint32_t kRun = Plan::kRun;
    // Runs of a part of the columns.
    static constexpr uint32_t kRunsOfPart = M::kSteps / kRun;

    KCCL_DEVICE void skip() {
        for (uint32_t run = 0; run < Plan::kRuns; ++run) {
            (void)crew_.vectors().await_front();
            crew_.vectors().pop();
        }
    }

    // Multiplies a row tile and lane with the vectors of a part.
    KCCL_DEVICE void multiply(uint32_t tile, uint32_t part) {
        const uint8_t* const row = weights_ + uint64_t{tile} * M::kSteps * M::kStepBytes;
        // In registers: in shared memory they would take as much of its time as the vectors of a
        // short product.
        float totals[Plan::kEach][Unit::kTotals] = {};
        typename Unit::Weights tiles[kRun];
        KCCL_UNROLL
        for (uint32_t i = 0; i < kRun; ++i) tiles[i] = lane_.weights(row + i * M::kStepBytes);
        uint32_t run = 0;
#pragma unroll 1
        for (uint32_t of_columns = 0; of_columns < S::kWarps; ++of_columns) {
            typename Unit::Sums sums[Plan::kEach] = {};
#pragma unroll 1
            for (uint32_t left = kRunsOfPart; left > 0; --left) {
                // Each tile is loaded when that of the run before has been multiplied.
                const uint8_t* const next = row + offset_of(++run);
                const bool has_next = run < Plan::kRuns;
                if (run + 1 < Plan::kRuns) prefetch(row + offset_of(run + 1));
                const auto* const vectors =
                    reinterpret_cast<const StagedQuad*>(crew_.vectors().await_front()) +
                    part * kVectors * kTileQuads;
                KCCL_UNROLL
                for (uint32_t i = 0; i < kRun; ++i) {
                    KCCL_UNROLL
                    for (uint32_t k = 0; k < Plan::kEach; ++k) {
                        const uint32_t at = i * Chunk<S>::kStripe + k * Unit::kVectors * kTileQuads;
                        Unit::multiply(sums[k], tiles[i], lane_.inputs(vectors + at));
                    }
                    if (has_next) tiles[i] = lane_.weights(next + i * M::kStepBytes);
                }
                crew_.vectors().pop();
            }
            KCCL_UNROLL
            for (uint32_t k = 0; k < Plan::kEach; ++k) {
                float* total = totals[k];
                lane_.totals(sums[k], [&](uint32_t, uint32_t, float sum) { *total++ += sum; });
            }
        }
        store(totals, tile, part);
    }

    KCCL_DEVICE void store(const float (&totals)[Plan::kEach][Unit::kTotals], uint32_t tile,
                           uint32_t part) const {
        auto* const all = reinterpret_cast<float*>(crew_.shared().totals) +
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

    // The offset of a run's first tile within a row that has all parts of the columns.
    KCCL_DEVICE static uint64_t offset_of(uint32_t run) {
        return uint64_t{run % kRunsOfPart * kRun} * M::kStepBytes + run / kRunsOfPart * kTileBytes;
    }

    // Asks for a run's weights.
    KCCL_DEVICE static void prefetch(const uint8_t* from) {
        constexpr uint32_t kLines = kTileBytes / kKcclLineBytes;
        for (uint32_t i = warp().index(); i < kRun * kLines; i += platform::kWarpSize) {
            mem::prefetch(from + i / kLines * M::kStepBytes + i % kLines * kKcclLineBytes);
        }
    }

    // Vectors of a part.
    static constexpr uint32_t kVectors = Plan::kEach * Unit::kVectors;

    Crew<S>& crew_;
    const typename Unit::Lane lane_;
    const uint8_t* const weights_;
    const uint32_t num_items_;
};

// Where the weights of the block's rows begin.
template <class S>
KCCL_DEVICE const uint8_t* weights_of(Crew<S>& crew, Product<S> product, uint32_t layer) {
    using Dims = Shape<S>;
    const uint64_t tile = Dims::stream_of(crew.block()) + layer * Dims::packed_by(crew.member()) +
                          packed_before<S>(product, crew.member());
    return reinterpret_cast<const uint8_t*>(crew.task().weights) + tile * kTileBytes;
}

// Asks for the first weights of a row tile, each warp for another one. Called while the block has
// other things to do, so that the memory has none of that time to rest.
template <class M, class S>
KCCL_DEVICE void prefetch_weights(Crew<S>& crew, Product<S> product, uint32_t layer) {
    constexpr uint32_t kAhead = 8 < M::kSteps * S::kWarps ? 8 : M::kSteps * S::kWarps;
    constexpr uint32_t kLines = kTileBytes / kKcclLineBytes;
    const uint32_t mine = crew.warp_index();
    if (mine >= M::tiles_of(crew.member()).num) return;
    const uint8_t* const row =
        weights_of(crew, product, layer) + uint64_t{mine} * M::kLanes * M::kSteps * M::kStepBytes;
    for (uint32_t i = warp().index(); i < kAhead * kLines; i += platform::kWarpSize) {
        const uint32_t tile = i / kLines;
        mem::prefetch(row + tile % M::kSteps * M::kStepBytes + tile / M::kSteps * kTileBytes +
                      i % kLines * kKcclLineBytes);
    }
}

// One product of the block, in a layer.
template <class M, class S>
KCCL_DEVICE void multiply_chunk(Crew<S>& crew, Product<S> product, uint32_t layer) {
    ChunkMultiplier<M, S> multiplier(crew, weights_of(crew, product, layer),
                                     M::tiles_of(crew.member()).num);
    multiplier.run();
}

// The sums of a quad of rows: quad `quad` of row tile and lane `tile`, for a position.
template <class S>
KCCL_DEVICE Quad total_of(Crew<S>& crew, uint32_t tile, uint32_t number, uint32_t quad) {
    return mem::load_plain(crew.shared().totals + (tile * S::kChunk + number) * kTileQuads + quad);
}

}  // namespace kccl::decode
