// Which part of the columns' vectors a thread passes to the matrix unit.
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

}  // namespace kccl::decode
