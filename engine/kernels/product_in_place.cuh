// Multiplies stages of weights where they lie in the ring, part by part. Products of experts with
// scales are multiplied so: product.cuh holds whole stages, for which a thread of a mixture has too
// few registers. So are products with minimums, whose code for two whole stages is slower than this
// short loop (bench/LOG.md), and products with scales where several positions share the weights.
#pragma once

#include "column_lanes.cuh"
#include "consumer_warp.cuh"
#include "steps.cuh"

namespace kccl::decode {

// Whether stages in format F are multiplied in place: part by part, or as stages of experts with
// scales in a format that only experts have.
template <class S, class F>
constexpr bool kIsInPlace =
    kIsPartByPart<S, F> || (!S::kWeightsInRegisters && kHasScales<F> && kIsOfExperts<S, F>);

// A warp's pass through a product in format F. A part of a stage is so many steps, and lies in one
// row tile and lane; or it has several, if its strips are short. Each part is loaded while the one
// before it is multiplied. TURNS: how many times a tile is multiplied, because the matrix unit
// takes some columns at a time (Multiplier in product.cuh).
template <class F, class S, uint32_t TURNS>
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

    // Takes the product's stages, multiplies, and leaves the sums in the warp's area,
    // [column][row tile][lane][row].
    KCCL_DECODE void run() {
        warp().sync();
        if constexpr (F::kHasMinimums) {
            if constexpr (kKnowsSums) sums().make(staged_, steps_.of_lanes);
            run_part_by_part();
        } else {
            run_stage_by_stage();
        }
    }

  private:
    // One loop over the parts of all stages, whose code is short.
    KCCL_DECODE void run_part_by_part() {
        Strip<F> ahead[kStrips];
        await_and_load(ahead);
        uint32_t first = 0;
#pragma unroll 1
        for (uint32_t left = steps_.num;; left -= kPart) {
            Strip<F> strips[kStrips];
            KCCL_UNROLL
            for (uint32_t i = 0; i < kStrips; ++i) strips[i] = ahead[i];
            const bool is_last = left <= kPart;
            first += kPart;
            if (first < kAtOnce && !is_last) {
                load(ahead, first);
            } else {
                let_go(is_last, ahead);
                first = 0;
            }
            multiply(strips);
            if (is_last) return;
        }
    }

    // A loop over stages, whose parts are unrolled.
    KCCL_DECODE void run_stage_by_stage() {
        // Parts take turns, so that none moves between registers.
        constexpr uint32_t kTurns = least_of(2, kAtOnce / kPart);
        Strip<F> turns[kTurns][kStrips];
        await_and_load(turns[0]);
#pragma unroll 1
        for (uint32_t left = steps_.num;; left -= kAtOnce) {
            KCCL_UNROLL
            for (uint32_t first = 0; first < kAtOnce; first += kPart) {
                const uint32_t turn = first / kPart % kTurns;
                Strip<F> strips[kStrips];
                KCCL_UNROLL
                for (uint32_t i = 0; i < kStrips; ++i) strips[i] = turns[turn][i];
                const bool is_last = left <= first + kPart;
                if (first + kPart < kAtOnce && !is_last) {
                    load(turns[(turn + 1) % kTurns], first + kPart);
                } else {
                    let_go(is_last, turns[0]);
                }
                multiply(strips);
                if (is_last) return;
            }
        }
    }

    using Unit = Mma<typename F::Operand>;
    template <uint32_t TURN>
    static constexpr uint32_t kOfTurn = TURN * Unit::kVectors * Shape<S>::kMostStaged;
    static constexpr uint32_t kAtOnce = kStageStepsOf<S, F>;
    static constexpr uint32_t kMostOfPart = 8;
    template <bool HAS_LANES, class M>
    KCCL_CONSTEXPR static uint32_t part_within(uint32_t part) {
        if (!kIsSame<F, typename M::Format>) return part;
        return common_divisor(part, HAS_LANES ? M::kAllSteps : M::kSteps);
    }
    // HAS_LANES: whether a part may have several row tiles and lanes.
    template <bool HAS_LANES, class... M>
    KCCL_CONSTEXPR static uint32_t part_of(Matrices<M...>) {
        uint32_t whole = HAS_LANES ? kAtOnce : common_divisor(kAtOnce, kMostOfPart);
        ((whole = part_within<HAS_LANES, M>(whole)), ...);
        whole = part_within<HAS_LANES, typename Shape<S>::Head>(whole);
        uint32_t part = kMostOfPart;
        while (whole % part != 0 || part % F::kStripTiles != 0) --part;
        return part;
    }
    // A part of one or two tiles takes as long as one of six. So with short strips such parts get
    // several row tiles and lanes. Then a warp has few tiles, and knows no sums of the vector: a
    // product with ones for each tile takes less time than to make them before the first one.
    static constexpr uint32_t kLeastPart = 4;
    static constexpr uint32_t kOfOne = part_of<false>(Products<S>{});
    static constexpr uint32_t kOfAll = part_of<true>(Products<S>{});
    static constexpr bool kHasLanes = F::kHasMinimums && F::kStripTiles == kLateTiles<F> &&
                                      kOfOne < kLeastPart && kOfAll > kOfOne;
    // Kernels with several columns use ones, too: the sums of all columns would have to be made.
    static constexpr bool kKnowsSums = F::kHasMinimums && !kHasLanes && S::kColumns == 1;
    static constexpr uint32_t kPart = kHasLanes ? kOfAll : kOfOne;
    static constexpr uint32_t kStrips = kPart / F::kStripTiles;
    static_assert(kPart % F::kStripTiles == 0, "whole strips");

    // Loads a part of the stage, from step `first` on.
    KCCL_DECODE void load(Strip<F> (&ahead)[kStrips], uint32_t first) {
        KCCL_UNROLL
        for (uint32_t i = 0; i < kStrips; ++i) {
            ahead[i] = consumer_.weights().template strip<F>(lanes_.template of<0>(),
                                                             first / F::kStripTiles + i);
        }
    }
    // Frees a stage, all of which is in registers, and loads the first part of the next one.
    // Without overlap (S::kOverlaps) that is asked for before this stage's last part is multiplied.
    KCCL_DECODE void let_go(bool is_last, Strip<F> (&ahead)[kStrips]) {
        consumer_.stamp_stage();
        consumer_.weights().has_copied();
        if (!is_last) await_and_load(ahead);
    }
    KCCL_DECODE void await_and_load(Strip<F> (&ahead)[kStrips]) {
        consumer_.weights().template await<F>(warp_);
        load(ahead, 0);
    }

    KCCL_DECODE void multiply(const Strip<F> (&strips)[kStrips]) {
        if constexpr (kHasLanes) return multiply_lanes(strips);
        multiply_turn<0>(strips);
        if constexpr (TURNS > 1) multiply_turn<1>(strips);
        step();
        left_ -= kPart;
        if (left_ == 0) store();
    }
    template <uint32_t TURN>
    KCCL_DECODE void multiply_turn(const Strip<F> (&strips)[kStrips]) {
        if constexpr (kIsPaired<S, F>) return multiply_pairs(strips);
        const auto input = input_of<TURN>();
        if constexpr (kKnowsSums) {
            const auto known = sums().from(at_);
            const LateChains<F, decltype(input), decltype(known)> chains(input, known);
            KCCL_UNROLL
            for (uint32_t i = 0; i < kStrips; ++i) chains.add(sums_[TURN], strips[i], i);
        } else {
            multiply_strips<F, kStrips>(sums_[TURN], strips, input);
        }
    }

    // Multiplies as multiply() does, by vectors that are staged in pairs.
    KCCL_DECODE void multiply_pairs(const Strip<F> (&strips)[kStrips]) {
        if constexpr (kIsPaired<S, F>) {
            static_assert(TURNS == 1, "a mixture has one column");
            const auto* const pairs =
                reinterpret_cast<const PairedFloat4s*>(staged_ + at_ * kTileFloat4s);
            OfTwoTiles<typename Unit::Inputs> inputs[kPart / 2];
            KCCL_UNROLL
            for (uint32_t i = 0; i < kPart / 2; ++i) {
                inputs[i] = lanes_.template of<0>().paired(pairs + i * kTileFloat4s);
            }
            multiply_strips<F, kStrips>(sums_[0], strips,
                                        [&](uint32_t i) { return inputs[i / 2].tile[i % 2]; });
        }
    }

    // Row tiles and lanes may end with any strip. All products come before the first branch.
    KCCL_DECODE void multiply_lanes(const Strip<F> (&strips)[kStrips]) {
        if constexpr (kHasLanes) {
            const auto first = input_of<0>();
            const auto second = input_of<TURNS - 1>();
            using Input = decltype(first);
            using Second = decltype(second);
            const LateChains<F, Input> chains(first);
            const LateChains<F, Second> further(second);
            typename LateChains<F, Input>::Some some[kStrips];
            typename LateChains<F, Second>::Some others[kStrips];
            KCCL_UNROLL
            for (uint32_t i = 0; i < kStrips; ++i) {
                chains.multiply(some[i], strips[i], i, 0);
                if constexpr (TURNS > 1) further.multiply(others[i], strips[i], i, 0);
            }
            step();
            KCCL_UNROLL
            for (uint32_t i = 0; i < kStrips; ++i) {
                chains.add_some(sums_[0], some[i], strips[i], 0);
                if constexpr (TURNS > 1) further.add_some(sums_[1], others[i], strips[i], 0);
                left_ -= F::kStripTiles;
                if (left_ == 0) store();
            }
        }
    }

    // Returns a function that returns this thread's part of the vectors' i-th tile from here on.
    template <uint32_t TURN>
    KCCL_DECODE auto input_of() const {
        const StagedFloat4* const vector = staged_ + kOfTurn<TURN> + at_ * kTileFloat4s;
        const auto& lane = lanes_.template of<TURN>();
        return [&lane, vector](uint32_t i) { return lane.inputs(vector + i * kTileFloat4s); };
    }
    KCCL_DECODE void step() {
        at_ += kPart;
        if (at_ == steps_.of_lanes) at_ = 0;
    }

    KCCL_DECODE KnownSums<F> sums() const { return KnownSums<F>(consumer_.shared().sums[warp_]); }

    // Stores the sums of a row tile and lane, and begins the next one.
    KCCL_DECODE void store() {
        store_turn<S, 0>(lanes_, sums_[0], area_);
        if constexpr (TURNS > 1) store_turn<S, 1>(lanes_, sums_[1], area_);
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
    typename Unit::Scaled sums_[TURNS] = {};
};

}  // namespace kccl::decode
