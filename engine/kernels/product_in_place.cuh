// Multiplies stages of weights where they lie in the ring, part by part. Products of experts with
// scales are multiplied so: product.cuh holds whole stages, for which a thread of a mixture has too
// few registers (bench/LOG.md).
#pragma once

#include "column_lanes.cuh"
#include "consumer_warp.cuh"
#include "steps.cuh"

namespace kccl::decode {

// Whether stages in format F are multiplied in place: where only experts have the format, and it
// has scales.
template <class S, class F>
constexpr bool kIsInPlace = !S::kWeightsInRegisters && kHasScales<F> && kIsOfExperts<S, F>;

// A warp's pass through a product in format F. A part of a stage is so many steps, and lies in one
// row tile and lane. Each part is loaded while the one before it is multiplied.
template <class F, class S>
class InPlaceMultiplier {
  public:
    KCCL_DECODE InPlaceMultiplier(ConsumerWarp<S>& consumer, const Steps& steps)
        : consumer_(consumer),
          steps_(steps),
          lanes_(consumer.num_columns()),
          warp_(mem::forget_index(consumer.warp_index())),
          staged_(consumer.staged()),
          area_(reinterpret_cast<float*>(consumer.area(consumer.warp_index()))),
          left_(steps.each) {}

    // Takes the product's stages, multiplies, and leaves the sums in the warp's area, [row
    // tile][lane][row].
    KCCL_DECODE void run() {
        warp().sync();
        Strip<F> ahead[kStrips];
        await_and_load(ahead);
#pragma unroll 1
        for (uint32_t left = steps_.num;; left -= kAtOnce) {
            KCCL_UNROLL
            for (uint32_t first = 0; first < kAtOnce; first += kPart) {
                Strip<F> strips[kStrips];
                KCCL_UNROLL
                for (uint32_t i = 0; i < kStrips; ++i) strips[i] = ahead[i];
                const bool is_last = left <= first + kPart;
                if (first + kPart < kAtOnce && !is_last) {
                    load(ahead, first + kPart);
                } else {
                    // All of the stage is in registers. Without overlap (S::kOverlaps) the next one
                    // is asked for before this part is multiplied.
                    consumer_.stamp_stage();
                    consumer_.weights().has_copied();
                    if (!is_last) await_and_load(ahead);
                }
                multiply(strips);
                if (is_last) return;
            }
        }
    }

  private:
    using Unit = Mma<typename F::Operand>;
    static_assert(S::kColumns == 1, "a mixture has one column");
    static constexpr uint32_t kAtOnce = kStageStepsOf<S, F>;
    static constexpr uint32_t kMostOfPart = 8;
    template <class... M>
    KCCL_CONSTEXPR static uint32_t part_of(Matrices<M...>) {
        uint32_t part = common_divisor(kAtOnce, kMostOfPart);
        ((part = kIsSame<F, typename M::Format> ? common_divisor(part, M::kSteps) : part), ...);
        return part;
    }
    static constexpr uint32_t kPart = part_of(Products<S>{}), kStrips = kPart / F::kStripTiles;
    static_assert(kPart % F::kStripTiles == 0, "whole strips");

    // Loads a part of the stage, from step `first` on.
    KCCL_DECODE void load(Strip<F> (&ahead)[kStrips], uint32_t first) {
        KCCL_UNROLL
        for (uint32_t i = 0; i < kStrips; ++i) {
            ahead[i] = consumer_.weights().template strip<F>(lanes_.template of<0>(),
                                                             first / F::kStripTiles + i);
        }
    }
    KCCL_DECODE void await_and_load(Strip<F> (&ahead)[kStrips]) {
        consumer_.weights().template await<F>(warp_);
        load(ahead, 0);
    }

    KCCL_DECODE void multiply(const Strip<F> (&strips)[kStrips]) {
        const auto& lane = lanes_.template of<0>();
        const StagedFloat4* const vector = staged_ + at_ * kTileFloat4s;
        multiply_strips<F, kStrips>(
            sums_, strips, [&](uint32_t i) { return lane.inputs(vector + i * kTileFloat4s); });
        at_ += kPart;
        if (at_ == steps_.of_lanes) at_ = 0;
        left_ -= kPart;
        if (left_ == 0) store();
    }

    // Stores the sums of a row tile and lane, and begins the next one.
    KCCL_DECODE void store() {
        lanes_.template of<0>().totals(sums_, [&](uint32_t row, uint32_t vector, float sum) {
            if (vector == 0 && row < kTileRows) mem::store_plain(area_ + row, sum);
        });
        sums_ = {};
        area_ += kTileRows;
        left_ = steps_.each;
    }

    ConsumerWarp<S>& consumer_;
    const Steps steps_;
    const ColumnLanes<F, S> lanes_;
    const uint32_t warp_;
    const StagedFloat4* const staged_;
    float* area_;
    uint32_t at_ = 0;  // the next step's number within all lanes
    uint32_t left_;    // steps of this row tile and lane
    typename Unit::Scaled sums_ = {};
};

}  // namespace kccl::decode
