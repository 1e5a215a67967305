// The sums of a warp's part of the vector over each minimum's columns, in shared memory. All row
// tiles of a product use them, so a warp makes them once, before its first tile.
#pragma once

#include "shape.cuh"

namespace kccl::decode {

// What a block's shared memory has for products in place whose format has minimums. In other models
// it is empty.
template <class S, bool HAS_MINIMUMS = S::Formats::kHaveMinimums && S::kColumns == 1>
struct SharedSums {};
template <class S>
struct SharedSums<S, true> {
    // [warp]: two floats for each tile of its part of the vector, and for some behind the last one.
    alignas(16) float sums[S::kWarps][2 * (Shape<S>::kMostStaged / kTileFloat4s + 4)];
};

// Those of a warp, for a product in format F.
template <class F>
class KnownSums {
    using Unit = Mma<typename F::Operand>;

  public:
    // all: the warp's part of SharedSums.
    KCCL_DECODE explicit KnownSums(float* all) : all_(all) {}

    // Makes the sums of a vector of `num` tiles, by products with ones. One product has as many
    // minimums as it takes vectors. Called by all threads of the warp.
    KCCL_DECODE void make(const StagedFloat4* staged, uint32_t num) {
        constexpr uint32_t kEach = F::kLoweredTiles, kFloat4s = kEach * kTileFloat4s;
#pragma unroll 1
        for (uint32_t i = 0; i < num / kEach; i += Unit::kVectors) {
            const typename Unit::Lane lane(least_of(Unit::kVectors, num / kEach - i), kFloat4s);
            typename Unit::Sums sums = {};
            KCCL_UNROLL
            for (uint32_t k = 0; k < kEach; ++k) {
                const uint32_t at = i * kFloat4s + k * kTileFloat4s;
                Unit::multiply(sums, F::ones(), lane.inputs(staged + at));
            }
            lane.store_parts(sums, all_ + Unit::kParts * i);
        }
        warp().sync();
    }

    // Returns those from tile `at` on, for LateChains.
    KCCL_DECODE auto from(uint32_t at) const {
        const float* const first = all_ + Unit::kParts * (at / F::kLoweredTiles);
        return [first](uint32_t i) { return Unit::sums_of(first + Unit::kParts * i); };
    }

  private:
    float* const all_;
};

}  // namespace kccl::decode
