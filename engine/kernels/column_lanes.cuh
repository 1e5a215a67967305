// Which part of the columns' vectors a thread passes to the matrix unit, and where their sums go.
#pragma once

#include "columns.cuh"

namespace kccl::decode {

// Which part of the columns' vectors this thread passes to the matrix unit (Mma::Lane in mma.cuh):
// of<0>() for the first kVectors columns, of<1>() for the others. `num` columns are used.
template <class F, class S, bool HAS_TURNS = (S::kColumns > Mma<typename F::Operand>::kVectors)>
class ColumnLanes {
  public:
    using Unit = Mma<typename F::Operand>;
    static constexpr uint32_t kTurns = 1;

    KCCL_DECODE explicit ColumnLanes(uint32_t num)
        : lane_(num, S::kColumns == 1 ? 0 : Shape<S>::kMostStaged) {}
    template <uint32_t TURN>
    KCCL_DECODE const typename Unit::Lane& of() const {
        return lane_;
    }

  private:
    const typename Unit::Lane lane_;
};
template <class F, class S>
class ColumnLanes<F, S, true> {
  public:
    using Unit = Mma<typename F::Operand>;
    static constexpr uint32_t kTurns = 2;
    static_assert(S::kColumns <= kTurns * Unit::kVectors, "two turns");

    KCCL_DECODE explicit ColumnLanes(uint32_t num)
        : first_(least_of(num, Unit::kVectors), Shape<S>::kMostStaged),
          second_(num > Unit::kVectors ? num - Unit::kVectors : 1, Shape<S>::kMostStaged) {}
    template <uint32_t TURN>
    KCCL_DECODE const typename Unit::Lane& of() const {
        if constexpr (TURN == 0) {
            return first_;
        } else {
            return second_;
        }
    }

  private:
    const typename Unit::Lane first_;
    const typename Unit::Lane second_;
};

// Stores the sums of a row tile in the warp's area, for the columns of a turn, and clears them.
// area: where those of column 0 begin. Called by all threads of the warp.
template <class S, uint32_t TURN, class Lanes, class Sums>
KCCL_DECODE void store_turn(const Lanes& lanes, Sums& sums, float* area) {
    constexpr uint32_t kVectors = Lanes::Unit::kVectors;
    constexpr uint32_t kNum = least_of(S::kColumns - TURN * kVectors, kVectors);
    constexpr uint32_t kFloatsOfColumn = Shape<S>::kMostSums * 4;
    lanes.template of<TURN>().totals(sums, [&](uint32_t row, uint32_t vector, float sum) {
        if constexpr (S::kColumns == 1) {
            if (vector == 0 && row < kTileRows) mem::store_plain(area + row, sum);
        } else if (vector < kNum && row < kTileRows) {
            const uint32_t column = TURN * kVectors + vector;
            mem::store_plain(area + column * kFloatsOfColumn + row, sum);
        }
    });
    sums = {};
}

}  // namespace kccl::decode
