// Multiplies packed weights by the vector that the warp has staged. weights.cuh says where the
// weights come from.
//
// Its loops take numbers instead of types: all products share their code.
#pragma once

#include "consumer_warp.cuh"

namespace kccl::decode {

// The work of a warp in a product. A step is one tile times four float4s of the staged vector. The
// steps go through the row tiles and their lanes.
struct Steps {
    uint32_t num;       // steps of all of the block's rows
    uint32_t each;      // steps of a row tile and lane
    uint32_t of_lanes;  // steps of the staged vector; after them it begins again
};

template <class M>
KCCL_CONSTEXPR Steps steps_of(uint32_t num_tiles) {
    return {num_tiles * M::kAllSteps, M::kSteps, M::kAllSteps};
}

// Returns the work of a warp of this block in a product, with the steps of all rows of the block.
template <class S>
KCCL_DECODE Steps steps_of_product(uint32_t block, Product<S> product) {
    using Dims = Shape<S>;
    const uint32_t block_in_group = Dims::block_in_group_of(block);
#define KCCL_STEPS(NAME)                                     \
    case Product<S>::k##NAME: {                              \
        using M = typename Dims::NAME;                       \
        return steps_of<M>(M::tiles_of(block_in_group).num); \
    }
    switch (product) {
        KCCL_OF_PRODUCTS(KCCL_STEPS)
        default: return steps_of<typename Dims::Head>(Dims::head_tiles_of(block).num);
    }
#undef KCCL_STEPS
}

// Where a product's tiles begin in a block's tiles of a layer.
template <class S>
KCCL_DECODE uint64_t packed_before(Product<S> product, uint32_t block_in_group) {
    return Products<S>::packed_of(block_in_group, static_cast<uint32_t>(product));
}

// A product's first stage of weights, if the warp has loaded it before its vector has come.
template <class S>
struct FirstStage {
    bool is_loaded = false;
    Held<S> tiles[S::kStageSteps] = {};
};

// Loads the first stage if it has arrived, so that its place takes other weights while the warp
// waits for its vector. F: the product's format. Called by all threads of the warp.
template <class S>
struct LoadFirst {
    template <class F>
    KCCL_DECODE void run() const {
        const typename Mma<typename F::Operand>::Lane lane(1, 0);
        first->is_loaded = consumer.weights().template try_await<F>(consumer.warp_index());
        if (!first->is_loaded) return;
        KCCL_UNROLL
        for (uint32_t i = 0; i < S::kStageSteps; ++i) {
            first->tiles[i].template hold<F>(consumer.weights().template tile<F>(lane, i));
        }
        consumer.stamp_stage();
        consumer.weights().has_copied();
    }

    ConsumerWarp<S>& consumer;
    FirstStage<S>* first;
};

// A warp's pass through a product in format F.
template <class F, class S>
class Multiplier {
  public:
    KCCL_DECODE Multiplier(ConsumerWarp<S>& consumer, const Steps& steps)
        : consumer_(consumer),
          steps_(steps),
          lane_(1, 0),
          warp_(mem::forget_index(consumer.warp_index())),
          staged_(consumer.staged()),
          area_(reinterpret_cast<float*>(consumer.area(consumer.warp_index()))),
          left_(steps.each) {}

    // Takes the product's stages, multiplies, and leaves the sums in the warp's area,
    // [row tile][lane][row].
    KCCL_DECODE void run(const FirstStage<S>& first) {
        warp().sync();
        const auto even = [&](const Loaded& stage, uint32_t) { multiply_even(stage); };
        const auto whole = [&](const Loaded& stage, uint32_t left) { multiply_whole(stage, left); };
        const auto any = [&](const Loaded& stage, uint32_t left) { multiply_any(stage, left); };
        const bool is_even = steps_.each % kAtOnce == 0;
        const bool is_whole = kAtOnce % kShort == 0 && steps_.each == kShort;
        if constexpr (S::kWeightsInRegisters) {
            // There is only one loop, because the registers of a stage are the same in all
            // products.
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
    static constexpr uint32_t kAtOnce = S::kStageSteps;
    // The output projection has the fewest steps.
    static constexpr uint32_t kShort = Shape<S>::Out::kSteps;
    KCCL_CONSTEXPR static bool fits(uint32_t each) {
        return each % kAtOnce == 0 || (each == kShort && kAtOnce % kShort == 0);
    }
    template <class... M>
    KCCL_CONSTEXPR static bool all_fit(Matrices<M...>) {
        return (fits(M::kSteps) && ...);
    }
    static constexpr bool kHasOthers = !(all_fit(Products<S>{}) && fits(Shape<S>::Head::kSteps));

    struct Loaded {
        typename F::Stored tiles[kAtOnce];
        typename Unit::Inputs inputs[kAtOnce];
    };

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

    // Multiplies a stage, and loads the next one before that. A turn of the loop does two stages,
    // so that no stage moves between registers.
    template <class Multiply>
    KCCL_DECODE void one_ahead(const FirstStage<S>& first, Multiply multiply) {
        Loaded now;
        if (first.is_loaded) {
            KCCL_UNROLL
            for (uint32_t i = 0; i < kAtOnce; ++i) now.tiles[i] = first.tiles[i].template as<F>();
            load_inputs(now);
        } else {
            load(now);
        }
        uint32_t left = steps_.num;
#pragma unroll 2
        for (; left > kAtOnce; left -= kAtOnce) {
            Loaded next;
            load(next);
            multiply(now, left);
            now = next;
        }
        multiply(now, left);
    }

    // Loads a stage's steps, including those behind the product's last one. They lie in the stage,
    // and are not used.
    KCCL_DECODE void load(Loaded& loaded) {
        consumer_.weights().template await<F>(warp_);
        KCCL_UNROLL
        for (uint32_t i = 0; i < kAtOnce; ++i) {
            loaded.tiles[i] = consumer_.weights().template tile<F>(lane_, i);
        }
        load_inputs(loaded);
        consumer_.stamp_stage();
        consumer_.weights().has_copied();
    }

    KCCL_DECODE void load_inputs(Loaded& loaded) {
        const StagedFloat4* const vector = staged_ + at_ * kTileFloat4s;
        KCCL_UNROLL
        for (uint32_t i = 0; i < kAtOnce; ++i) {
            loaded.inputs[i] = lane_.inputs(vector + i * kTileFloat4s);
        }
        at_ += kAtOnce;
        if (at_ >= steps_.of_lanes) at_ = 0;
    }

    // All steps of the stage are of one row tile and lane.
    KCCL_DECODE void multiply_even(const Loaded& loaded) {
        KCCL_UNROLL
        for (uint32_t i = 0; i < kAtOnce; ++i) {
            Unit::multiply(sums_, F::operand(loaded.tiles[i]), loaded.inputs[i]);
        }
        left_ -= kAtOnce;
        if (left_ == 0) store();
    }

    // The stage has whole row tiles and lanes, of kShort steps.
    KCCL_DECODE void multiply_whole(const Loaded& loaded, uint32_t num) {
        KCCL_UNROLL
        for (uint32_t first = 0; first + kShort <= kAtOnce; first += kShort) {
            if (first >= num) break;
            KCCL_UNROLL
            for (uint32_t i = first; i < first + kShort; ++i) {
                Unit::multiply(sums_, F::operand(loaded.tiles[i]), loaded.inputs[i]);
            }
            store();
        }
    }

    KCCL_DECODE void multiply_any(const Loaded& loaded, uint32_t num) {
        KCCL_UNROLL
        for (uint32_t i = 0; i < kAtOnce; ++i) {
            if (i >= num) break;
            Unit::multiply(sums_, F::operand(loaded.tiles[i]), loaded.inputs[i]);
            if (--left_ == 0) store();
        }
    }

    // Stores the sums of a row tile and lane, and begins the next one.
    KCCL_DECODE void store() {
        lane_.totals(sums_, [&](uint32_t row, uint32_t vector, float sum) {
            if (vector == 0 && row < kTileRows) mem::store_plain(area_ + row, sum);
        });
        area_ += kTileRows;
        sums_ = {};
        left_ = steps_.each;
    }

    ConsumerWarp<S>& consumer_;
    const Steps steps_;
    const typename Unit::Lane lane_;
    const uint32_t warp_;
    const StagedFloat4* const staged_;
    float* area_;
    uint32_t at_ = 0;  // the next step's number within all lanes
    uint32_t left_;    // steps of this row tile and lane
    typename Unit::Sums sums_ = {};
};

// Multiplies one product of the block, in format F: see Multiplier::run(). Called by all threads of
// the warp.
template <class S>
struct Multiply {
    template <class F>
    KCCL_DECODE void run() const {
        if (steps.num == 0) return;
        Multiplier<F, S> multiplier(consumer, steps);
        multiplier.run(first);
    }

    ConsumerWarp<S>& consumer;
    const Steps& steps;
    const FirstStage<S>& first;
};

// ---- Rows ---------------------------------------------------------------------------------------

// Returns the k-th float4 of a block's rows that this thread finishes; it may lie behind the last
// one. Neighbouring float4s belong to different warps, so that all warps have some.
template <class S>
KCCL_DECODE uint32_t own_float4(const ConsumerWarp<S>& consumer, uint32_t k) {
    return (k * platform::kWarpSize + consumer.thread()) * S::kWarps + consumer.warp_index();
}

// Returns the sums of all warps, added in their order, for four rows: float4 `index4` of row tile
// and lane `tile`.
template <class S>
KCCL_DECODE Float4 total_of(ConsumerWarp<S>& consumer, uint32_t tile, uint32_t index4) {
    Float4 total = {};
    KCCL_UNROLL
    for (uint32_t each = 0; each < S::kWarps; ++each) {
        const Float4 part = mem::load_plain(consumer.area(each) + tile * kTileFloat4s + index4);
        KCCL_UNROLL
        for (int i = 0; i < 4; ++i) total.value[i] += part.value[i];
    }
    return total;
}

}  // namespace kccl::decode
