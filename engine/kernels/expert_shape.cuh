// Computes the sizes of a mixture of experts: its products, and where experts lie in memory.
//
// A position passes S::kPlaces of S::kExperts experts. Their places are numbered in the order of
// the experts' ids. All chosen experts together make one product of rows, ExpertGateUp, whose rows
// are [lane][place][row], and one of columns, ExpertDown, whose steps of a row tile and lane are
// [place][step]. So blocks share them as they share the matrices of any product, whichever experts
// are chosen.
//
// Experts do not lie in the blocks' weight streams, but behind all of them:
//
//     [layer][ExpertGateUp, ExpertDown][expert][row tile][lane][step][warp]
//
// where an expert's row tiles of ExpertGateUp are [lane][tile], and have no axis of lanes. So the
// address of a row tile does not depend on the block that multiplies it.
#pragma once

#include "format.cuh"
#include "sequence.cuh"

namespace kccl::decode {

// These are in shape.cuh.
template <class S, class F, uint32_t ROWS, uint32_t COLUMNS, uint32_t LANES, uint32_t BLOCKS,
          uint32_t LONGER = 0>
struct Matrix;
template <class S>
struct Shape;

// If<CONDITION, A, B>::Type is A if CONDITION is true, else B. The other one is not instantiated.
template <bool CONDITION, class A, class B>
struct If {
    using Type = A;
};
template <class A, class B>
struct If<false, A, B> {
    using Type = B;
};

// The rows of the router, one for each expert, and rows of zeros up to whole tiles. Each rank
// multiplies all of them: the residual is the same on all ranks, so they need no exchange.
template <class S>
constexpr uint32_t kRouterRows = (S::kExperts + kTileRows - 1) / kTileRows * kTileRows;

template <class S>
struct RouterMatrix : Matrix<S, typename S::RouterFormat, kRouterRows<S>, S::kHidden, 1,
                             Shape<S>::kBlocksPerGroup, Shape<S>::kLongerRouter> {};

// A part of an expert's matrix, whose steps follow each other in memory: up to `num` steps from
// step `first` of the expert's matrix on.
struct Piece {
    uint32_t place;
    uint32_t first;
    uint32_t num;
};

// What the two products of experts share. One: an expert's matrix, as one block would have it.
template <class ONE>
struct OfExperts {
    using One = ONE;
    // The steps of an expert's matrix.
    static constexpr uint32_t kStepsOfOne = ONE::kTiles * ONE::kAllSteps;
    // The size of an expert's matrix, in units of kUnitBytes.
    static constexpr uint64_t kUnitsOfOne = uint64_t{ONE::kTiles} * ONE::kPackedUnits;
};

template <class S>
struct ExpertGateUpMatrix
    : Matrix<S, typename S::ExpertGateUpFormat, 2 * Shape<S>::kLanesPerGroup * S::kPlaces * S::kFfn,
             S::kHidden, 1, Shape<S>::kBlocksPerGroup, Shape<S>::kLongerGateUp>,
      OfExperts<Matrix<S, typename S::ExpertGateUpFormat, 2 * Shape<S>::kLanesPerGroup * S::kFfn,
                       S::kHidden, 1, 1>> {
    using Base = Matrix<S, typename S::ExpertGateUpFormat,
                        2 * Shape<S>::kLanesPerGroup * S::kPlaces * S::kFfn, S::kHidden, 1,
                        Shape<S>::kBlocksPerGroup, Shape<S>::kLongerGateUp>;
    // It has no part of the weight streams, and the biases of all experts.
    static constexpr uint32_t kPackedUnits = 0;
    static constexpr uint32_t kBiasTiles = S::kExperts * ExpertGateUpMatrix::One::kTiles;
    // The row tiles of a lane and place.
    static constexpr uint32_t kTilesOfPlace = 2 * S::kFfn / kTileRows;

    // Returns the place that a row tile belongs to, and the tile's number in the expert's matrix.
    KCCL_CONSTEXPR static uint32_t place_of(uint32_t tile) {
        return tile / kTilesOfPlace % S::kPlaces;
    }
    KCCL_CONSTEXPR static uint32_t tile_of_one(uint32_t tile) {
        return tile / (kTilesOfPlace * S::kPlaces) * kTilesOfPlace + tile % kTilesOfPlace;
    }
    // Returns the piece that begins with a step of the block's rows, which begin with row tile
    // `first`.
    KCCL_CONSTEXPR static Piece piece_at(uint32_t first, uint32_t step) {
        const uint32_t tile = first + step / Base::kSteps, in_tile = step % Base::kSteps;
        return {place_of(tile), tile_of_one(tile) * Base::kSteps + in_tile,
                (kTilesOfPlace - tile % kTilesOfPlace) * Base::kSteps - in_tile};
    }
};

template <class S>
struct ExpertDownMatrix
    : Matrix<S, typename S::ExpertDownFormat, S::kHidden,
             S::kPlaces *
                 Matrix<S, typename S::ExpertDownFormat, S::kHidden, S::kFfn, 1, 1>::kSteps *
                 S::kWarps * kTileColumns,
             Shape<S>::kLanesPerGroup, Shape<S>::kBlocksPerGroup, Shape<S>::kLongerOut>,
      OfExperts<Matrix<S, typename S::ExpertDownFormat, S::kHidden, S::kFfn,
                       Shape<S>::kLanesPerGroup, 1>> {
    using One = typename OfExperts<Matrix<S, typename S::ExpertDownFormat, S::kHidden, S::kFfn,
                                          Shape<S>::kLanesPerGroup, 1>>::One;
    static constexpr uint32_t kPackedUnits = 0;
    static constexpr uint32_t kBiasTiles = S::kExperts * One::kTiles;
    // The steps of a row tile, lane and place.
    static constexpr uint32_t kEach = One::kSteps;

    KCCL_CONSTEXPR static Piece piece_at(uint32_t first, uint32_t step) {
        const uint32_t of_row = One::kLanes * S::kPlaces * kEach;
        const uint32_t tile = first + step / of_row, in_row = step % of_row;
        const uint32_t lane = in_row / (S::kPlaces * kEach);
        const uint32_t place = in_row / kEach % S::kPlaces, in_place = step % kEach;
        return {place, (tile * One::kLanes + lane) * kEach + in_place, kEach - in_place};
    }
};

// The one of two matrices that needs more of its vector staged.
template <class A, class B, bool IS_FIRST = (A::kStagedSteps >= B::kStagedSteps)>
struct MoreStaged {
    using Type = A;
};
template <class A, class B>
struct MoreStaged<A, B, false> {
    using Type = B;
};
// The one of the products that multiply the residual that needs most of it staged.
template <class S, class QKV, class OF_MLP, bool HAS_EXPERTS = S::kHasExperts>
struct MostStaged : MoreStaged<QKV, OF_MLP> {};
template <class S, class QKV, class OF_MLP>
struct MostStaged<S, QKV, OF_MLP, true>
    : MoreStaged<typename MoreStaged<QKV, OF_MLP>::Type, ExpertGateUpMatrix<S>> {
    static_assert(QKV::kSteps == ExpertGateUpMatrix<S>::kSteps, "the same part of the residual");
};

// Where the experts lie behind the blocks' weight streams, in units of kUnitBytes: the layers
// follow each other. In a layer, the experts' matrices of a product follow each other.
template <class S>
struct ExpertMemory {
    static constexpr uint64_t kGateUpAt = 0;
    static constexpr uint64_t kDownAt = S::kExperts * ExpertGateUpMatrix<S>::kUnitsOfOne;
    static constexpr uint64_t kLayer = kDownAt + S::kExperts * ExpertDownMatrix<S>::kUnitsOfOne;
};

}  // namespace kccl::decode
