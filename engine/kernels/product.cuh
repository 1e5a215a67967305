// Multiplies packed weights by the vector that the warp has staged. weights.cuh says where the
// weights come from.
//
// The loops here take the sizes of a product as numbers, not as template parameters, so that all
// products share one loop's code.
#pragma once

#include "product_in_place.cuh"

namespace kccl::decode {

// A product's first stage of weights, if the warp has loaded it before its vector has come.
template <class S>
struct FirstStage {
    bool is_loaded = false;
    HeldStage<S> stage = {};
};

// Loads the first stage if it has arrived, so that its place takes other weights while the warp
// waits for its vector. F: the product's format. Called by all threads of the warp.
template <class S>
struct LoadFirst {
    template <class F>
    KCCL_DECODE void run() const {
        if constexpr (kIsOfExperts<S, F> || kIsInPlace<S, F>) return;
        const typename Mma<typename F::Operand>::Lane lane(1, 0);
        first->is_loaded = consumer.weights().template try_await<F>(consumer.warp_index());
        if (!first->is_loaded) return;
        KCCL_UNROLL
        for (uint32_t i = 0; i < kStageStripsOf<S, F>; ++i) {
            first->stage.template hold<F>(i, consumer.weights().template strip<F>(lane, i));
        }
        consumer.stamp_stage();
        consumer.weights().has_copied();
    }

    ConsumerWarp<S>& consumer;
    FirstStage<S>* first;
};

// A warp's pass through a product in format F. TURNS: how many multiplications the columns that the
// token step uses take. Each number has loops of its own: with a branch in them, a second turn's
// inputs went through memory.
template <class F, class S, uint32_t TURNS>
class Multiplier {
  public:
    KCCL_DECODE Multiplier(ConsumerWarp<S>& consumer, const Steps& steps)
        : consumer_(consumer),
          steps_(steps),
          lanes_(consumer.num_columns()),
          warp_(mem::forget_index(consumer.warp_index())),
          staged_(consumer.staged()),
          area_(reinterpret_cast<float*>(consumer.area(consumer.warp_index()))),
          left_(steps.each) {}

    // Takes the product's stages, multiplies, and leaves the sums in the warp's area,
    // [column][row tile][lane][row].
    KCCL_DECODE void run(const FirstStage<S>& first) {
        warp().sync();
        const auto even = [&](const Loaded& stage, uint32_t) { multiply_even(stage); };
        const auto whole = [&](const Loaded& stage, uint32_t left) { multiply_whole(stage, left); };
        const auto any = [&](const Loaded& stage, uint32_t left) { multiply_any(stage, left); };
        const bool is_even = steps_.each % kAtOnce == 0;
        const bool is_whole = kAtOnce % kShort == 0 && steps_.each == kShort;
        if constexpr (S::kWeightsInRegisters) {
            // One loop with branches, not a loop for each case: in all cases the same registers
            // hold a stage.
            one_by_one([&](const Loaded& stage, uint32_t left) {
                if (is_even) {
                    even(stage, left);
                } else if (is_whole) {
                    whole(stage, left);
                } else if (kHasOthers) {
                    any(stage, left);
                }
            });
        } else if (is_even) {
            one_ahead(first, even);
        } else if (is_whole) {
            one_ahead(first, whole);
        } else if (kHasOthers) {
            one_ahead(first, any);
        }
    }

  private:
    using Unit = Mma<typename F::Operand>;
    using Lanes = ColumnLanes<F, S>;
    // A multiplication takes kVectors columns; the others are multiplied in a second turn.
    static constexpr uint32_t kTurns = TURNS;
    template <uint32_t TURN>
    static constexpr uint32_t kOfTurn = TURN * Unit::kVectors * Shape<S>::kMostStaged;
    static constexpr uint32_t kAtOnce = kStageStepsOf<S, F>;
    static constexpr uint32_t kEach = F::kStripTiles, kStrips = kAtOnce / kEach;
    // The output projection has the fewest steps.
    static constexpr uint32_t kShort = Shape<S>::Out::kSteps;
    template <class M>
    KCCL_CONSTEXPR static bool fits() {
        return !kIsSame<F, typename M::Format> || M::kSteps % kAtOnce == 0 ||
               (M::kSteps == kShort && kAtOnce % kShort == 0);
    }
    template <class... M>
    KCCL_CONSTEXPR static bool all_fit(Matrices<M...>) {
        return (fits<M>() && ...);
    }
    template <class M>
    KCCL_CONSTEXPR static bool is_even() {
        return !kIsSame<F, typename M::Format> || M::kIsEven;
    }
    template <class... M>
    KCCL_CONSTEXPR static bool are_even(Matrices<M...>) {
        return (is_even<M>() && ...);
    }
    static constexpr bool kAreEven = are_even(Products<S>{}) && is_even<typename Shape<S>::Head>();
    static constexpr bool kHasOthers = !(all_fit(Products<S>{}) && fits<typename Shape<S>::Head>());
    // The most strips whose products are under way at the same time. gpt-oss has 24 of a tile each
    // in a stage: their sums and inputs would take more registers than a thread has.
    static constexpr uint32_t kMostStrips = S::kHasExperts ? 8 : kStrips;

    // In formats with scales, inputs are loaded when their stage is multiplied (Chains), and not a
    // stage ahead. With tiles of 8 or 4 bits there are two or four times as many, for which a
    // thread has too few registers.
    template <bool IS_LATE = kHasScales<F>, int = 0>
    struct Stage {
        template <uint32_t TURN>
        KCCL_DECODE const typename Unit::Inputs& input(const Lanes&, uint32_t i) const {
            return inputs[TURN][i];
        }
        Strip<F> strips[kStrips];
        typename Unit::Inputs inputs[kTurns][kAtOnce];
    };
    template <int I>
    struct Stage<true, I> {
        template <uint32_t TURN>
        KCCL_DECODE typename Unit::Inputs input(const Lanes& lanes, uint32_t i) const {
            return lanes.template of<TURN>().inputs(vector + kOfTurn<TURN> + i * kTileFloat4s);
        }
        Strip<F> strips[kStrips];
        const StagedFloat4* vector;
    };
    using Loaded = Stage<>;

    // multiply(a stage, steps that are left of the product).
    template <class Multiply>
    KCCL_DECODE void one_by_one(Multiply multiply) {
#pragma unroll 1
        for (uint32_t done = 0; done < steps_.num; done += kAtOnce) {
            Loaded stage;
            load(stage);
            multiply(stage, steps_.num - done);
            consumer_.weights().has_multiplied(steps_.num - done);
        }
    }

    // Multiplies a stage, and loads the next one before that. Two stages take turns, so that none
    // moves between registers.
    template <class Multiply>
    KCCL_DECODE void one_ahead(const FirstStage<S>& first, Multiply multiply) {
        Loaded even, odd;
        if (!kIsOfExperts<S, F> && first.is_loaded) {
            KCCL_UNROLL
            for (uint32_t i = 0; i < kStrips; ++i) {
                even.strips[i] = first.stage.template strip<F>(i);
            }
            load_inputs(even);
        } else {
            load(even);
        }
        uint32_t left = steps_.num;
        while (true) {
            if (left <= kAtOnce) return multiply(even, left);
            load(odd);
            multiply(even, left);
            left -= kAtOnce;
            if (left <= kAtOnce) return multiply(odd, left);
            load(even);
            multiply(odd, left);
            left -= kAtOnce;
        }
    }

    // Loads a stage's steps, including those behind the product's last one. They lie in the stage,
    // and are not used.
    KCCL_DECODE void load(Loaded& loaded) {
        consumer_.weights().template await<F>(warp_);
        KCCL_UNROLL
        for (uint32_t i = 0; i < kStrips; ++i) {
            loaded.strips[i] = consumer_.weights().template strip<F>(lanes_.template of<0>(), i);
        }
        load_inputs(loaded);
        consumer_.stamp_stage();
        consumer_.weights().has_copied();
    }

    KCCL_DECODE void load_inputs(Loaded& loaded) {
        const StagedFloat4* const vector = staged_ + at_ * kTileFloat4s;
        if constexpr (kHasScales<F>) {
            loaded.vector = vector;
        } else {
            KCCL_UNROLL
            for (uint32_t i = 0; i < kAtOnce; ++i) {
                loaded.inputs[0][i] = lanes_.template of<0>().inputs(vector + i * kTileFloat4s);
            }
            if constexpr (kTurns > 1) {
                KCCL_UNROLL
                for (uint32_t i = 0; i < kAtOnce; ++i) {
                    loaded.inputs[1][i] =
                        lanes_.template of<1>().inputs(vector + kOfTurn<1> + i * kTileFloat4s);
                }
            }
        }
        at_ += kAtOnce;
        if constexpr (kAreEven) {
            if (at_ >= steps_.of_lanes) at_ = 0;
        } else {
            while (at_ >= steps_.of_lanes) at_ -= steps_.of_lanes;
        }
    }

    // Multiplies strips of a stage from a step on.
    template <uint32_t NUM>
    KCCL_DECODE void multiply(const Loaded& loaded, uint32_t first) {
        multiply_strips<F, NUM>(sums_[0], loaded.strips + first / kEach, [&](uint32_t i) {
            return loaded.template input<0>(lanes_, first + i);
        });
        multiply_second<NUM>(loaded, first);
    }
    template <uint32_t NUM>
    KCCL_DECODE void multiply_second(const Loaded& loaded, uint32_t first) {
        if constexpr (kTurns > 1) {
            multiply_strips<F, NUM>(sums_[1], loaded.strips + first / kEach, [&](uint32_t i) {
                return loaded.template input<1>(lanes_, first + i);
            });
        }
    }

    // All steps of the stage are of one row tile and lane.
    KCCL_DECODE void multiply_even(const Loaded& loaded) {
        multiply<kStrips>(loaded, 0);
        left_ -= kAtOnce;
        if (left_ == 0) store();
    }

    // The stage has whole row tiles and lanes, of kShort steps.
    KCCL_DECODE void multiply_whole(const Loaded& loaded, uint32_t num) {
        constexpr uint32_t kShortStrips = kShort / kEach;
        if constexpr (kShort % kEach == 0) {
            KCCL_UNROLL
            for (uint32_t first = 0; first + kShort <= kAtOnce; first += kShort) {
                if (first >= num) break;
                multiply<kShortStrips>(loaded, first);
                store();
            }
        }
    }

    KCCL_DECODE void multiply_any(const Loaded& loaded, uint32_t num) {
        if constexpr (kHasScales<F>) {
            multiply_part<0>(loaded, num);
        } else {
            for_strips<0, kStrips>(num, [&](uint32_t i) { multiply<1>(loaded, i); });
        }
    }

    // Multiplies the strips of a stage from strip FIRST on, kMostStrips at a time.
    template <uint32_t FIRST>
    KCCL_DECODE void multiply_part(const Loaded& loaded, uint32_t num) {
        constexpr uint32_t kNum = least_of(kStrips - FIRST, kMostStrips);
        // All products come before the first branch, so that none waits for another strip's (with
        // minimums they come strip by strip: LateChains).
        const auto input = [&](uint32_t i) {
            return loaded.template input<0>(lanes_, FIRST * kEach + i);
        };
        const auto chains = chains_of<F, kNum>(loaded.strips + FIRST, input);
        for_strips<FIRST, kNum>(num, [&](uint32_t i) {
            chains.add(sums_[0], loaded.strips[i], i - FIRST);
            multiply_second<1>(loaded, i * kEach);
        });
        if constexpr (FIRST + kNum < kStrips) {
            if ((FIRST + kNum) * kEach < num) multiply_part<FIRST + kNum>(loaded, num);
        }
    }

    // Calls add(i), which adds strip i of a stage to the sums, for NUM strips from FIRST on. Stores
    // the sums of each row tile.
    template <uint32_t FIRST, uint32_t NUM, class Add>
    KCCL_DECODE void for_strips(uint32_t num, Add add) {
        KCCL_UNROLL
        for (uint32_t i = FIRST; i < FIRST + NUM; ++i) {
            if (i * kEach >= num) break;
            add(i);
            left_ -= kEach;
            if (left_ == 0) store();
        }
    }

    // Stores the sums of a row tile and lane, and begins the next one.
    KCCL_DECODE void store() {
        store_turn<S, 0>(lanes_, sums_[0], area_);
        if constexpr (kTurns > 1) store_turn<S, 1>(lanes_, sums_[1], area_);
        area_ += kTileRows;
        left_ = steps_.each;
    }

    ConsumerWarp<S>& consumer_;
    const Steps steps_;
    const Lanes lanes_;
    const uint32_t warp_;
    const StagedFloat4* const staged_;
    float* area_;
    uint32_t at_ = 0;  // the next step's number within all lanes
    uint32_t left_;    // steps of this row tile and lane
    typename SumsOf<F>::Type sums_[kTurns] = {};
};

// Multiplies one product of the block, in format F: see run() of the multipliers. Called by all
// threads of the warp.
template <class S>
struct Multiply {
    template <class F>
    KCCL_DECODE void run() const {
        if (steps.num == 0) return;
        using Lanes = ColumnLanes<F, S>;
        constexpr uint32_t kTurns = Lanes::kTurns;
        if constexpr (kIsInPlace<S, F>) {
            if constexpr (kTurns > 1) {
                if (consumer.num_columns() > Lanes::Unit::kVectors) {
                    return InPlaceMultiplier<F, S, kTurns>(consumer, steps).run();
                }
            }
            InPlaceMultiplier<F, S, 1>(consumer, steps).run();
        } else {
            if constexpr (kTurns > 1) {
                if (consumer.num_columns() > Lanes::Unit::kVectors) {
                    Multiplier<F, S, kTurns> multiplier(consumer, steps);
                    return multiplier.run(first);
                }
            }
            Multiplier<F, S, 1> multiplier(consumer, steps);
            multiplier.run(first);
        }
    }

    ConsumerWarp<S>& consumer;
    const Steps& steps;
    const FirstStage<S>& first;
};

}  // namespace kccl::decode
