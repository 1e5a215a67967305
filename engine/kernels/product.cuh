// A product of packed weights with the vector that the warp has staged. weights.cuh says where the
// weights come from.
//
// Its loops take numbers instead of types: all products share their code.
#pragma once

#include "worker.cuh"

namespace kccl::decode {

// What a warp does in a product. Its steps are one row tile and lane after another; each is one
// tile times four quads of the staged vector.
struct Steps {
    uint32_t num;       // of the block's rows
    uint32_t each;      // of a row tile and lane
    uint32_t of_lanes;  // of what is staged: then the vector begins again
};

template <class M>
KCCL_CONSTEXPR Steps steps_of(uint32_t num_tiles) {
    return {num_tiles * M::kAllSteps, M::kSteps, M::kAllSteps};
}

// What a warp of this block does in a product: as many steps as the block's rows have.
template <class S>
KCCL_DEVICE Steps steps_of_product(uint32_t block, Product<S> product) {
    using Dims = Shape<S>;
    const uint32_t member = Dims::member_of(block);
#define KCCL_STEPS(NAME)                             \
    case Product<S>::k##NAME: {                      \
        using M = typename Dims::NAME;               \
        return steps_of<M>(M::tiles_of(member).num); \
    }
    switch (product) {
        KCCL_OF_PRODUCTS(KCCL_STEPS)
        default: return steps_of<typename Dims::Head>(Dims::head_tiles_of(block).num);
    }
#undef KCCL_STEPS
}

// Where the tiles of a product begin in what a block has of a layer.
template <class S>
KCCL_DEVICE uint64_t packed_before(Product<S> product, uint32_t member) {
    return Products<S>::packed_of(member, static_cast<uint32_t>(product));
}

// A product's first stage of weights, if the warp has loaded it before its vector came.
template <class S>
struct FirstStage {
    bool is_loaded = false;
    typename Mma<typename S::Weight>::Weights tiles[S::kStageSteps] = {};
};

// Loads the first stage if it is there now, so that its place takes other weights while the warp
// waits for its vector. All threads of the warp.
template <class S>
KCCL_DEVICE void load_first(Worker<S>& worker, FirstStage<S>* first) {
    const typename Mma<typename S::Weight>::Lane lane(1, 0);
    first->is_loaded = worker.weights().try_await(worker.warp_index());
    if (!first->is_loaded) return;
    KCCL_UNROLL
    for (uint32_t i = 0; i < S::kStageSteps; ++i) first->tiles[i] = worker.weights().tile(lane, i);
    worker.stamp_stage();
    worker.weights().has_copied();
}

// A warp's pass through a product.
template <class S>
class Multiplier {
  public:
    KCCL_DEVICE Multiplier(Worker<S>& worker, const Steps& steps)
        : worker_(worker),
          steps_(steps),
          lane_(1, 0),
          warp_(mem::forget_index(worker.warp_index())),
          staged_(worker.staged()),
          area_(reinterpret_cast<float*>(worker.area(worker.warp_index()))),
          left_(steps.each) {}

    // Takes the product's stages, multiplies, and leaves the sums in the warp's area,
    // [row tile][lane][row].
    KCCL_DEVICE void run(const FirstStage<S>& first) {
        warp().sync();
        const auto even = [&](const Loaded& stage, uint32_t) { multiply_even(stage); };
        const auto whole = [&](const Loaded& stage, uint32_t left) { multiply_whole(stage, left); };
        const auto any = [&](const Loaded& stage, uint32_t left) { multiply_any(stage, left); };
        const bool is_even = steps_.each % kAtOnce == 0;
        const bool is_whole = kAtOnce % kShort == 0 && steps_.each == kShort;
        if constexpr (S::kWeightsInRegisters) {
            // One loop, because the registers of a stage are the same in all products.
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
    using Unit = Mma<typename S::Weight>;
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
        typename Unit::Weights tiles[kAtOnce];
        typename Unit::Inputs inputs[kAtOnce];
    };

    // multiply(a stage, steps that are left of the product).
    template <class Multiply>
    KCCL_DEVICE void one_by_one(Multiply multiply) {
#pragma unroll 1
        for (uint32_t done = 0; done < steps_.num; done += kAtOnce) {
            Loaded stage;
            load(stage);
            multiply(stage, steps_.num - done);
            worker_.weights().has_multiplied(steps_.num - done);
        }
    }

    // Multiplies, and loads a stage before the one before it is multiplied. A turn of the loop has
    // two, so that none moves from registers to registers.
    template <class Multiply>
    KCCL_DEVICE void one_ahead(const FirstStage<S>& first, Multiply multiply) {
        Loaded now;
        if (first.is_loaded) {
            KCCL_UNROLL
            for (uint32_t i = 0; i < kAtOnce; ++i) now.tiles[i] = first.tiles[i];
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

    // Loads a stage's steps, also those behind the product's last one: they are in the stage, and
    // not used.
    KCCL_DEVICE void load(Loaded& loaded) {
        worker_.weights().await(warp_);
        KCCL_UNROLL
        for (uint32_t i = 0; i < kAtOnce; ++i) loaded.tiles[i] = worker_.weights().tile(lane_, i);
        load_inputs(loaded);
        worker_.stamp_stage();
        worker_.weights().has_copied();
    }

    KCCL_DEVICE void load_inputs(Loaded& loaded) {
        const StagedQuad* const vector = staged_ + at_ * kTileQuads;
        KCCL_UNROLL
        for (uint32_t i = 0; i < kAtOnce; ++i) {
            loaded.inputs[i] = lane_.inputs(vector + i * kTileQuads);
        }
        at_ += kAtOnce;
        if (at_ >= steps_.of_lanes) at_ = 0;
    }

    // All steps of the stage are of one row tile and lane.
    KCCL_DEVICE void multiply_even(const Loaded& loaded) {
        KCCL_UNROLL
        for (uint32_t i = 0; i < kAtOnce; ++i) {
            Unit::multiply(sums_, loaded.tiles[i], loaded.inputs[i]);
        }
        left_ -= kAtOnce;
        if (left_ == 0) store();
    }

    // The stage has whole row tiles and lanes, of kShort steps.
    KCCL_DEVICE void multiply_whole(const Loaded& loaded, uint32_t num) {
        KCCL_UNROLL
        for (uint32_t first = 0; first + kShort <= kAtOnce; first += kShort) {
            if (first >= num) break;
            KCCL_UNROLL
            for (uint32_t i = first; i < first + kShort; ++i) {
                Unit::multiply(sums_, loaded.tiles[i], loaded.inputs[i]);
            }
            store();
        }
    }

    KCCL_DEVICE void multiply_any(const Loaded& loaded, uint32_t num) {
        KCCL_UNROLL
        for (uint32_t i = 0; i < kAtOnce; ++i) {
            if (i >= num) break;
            Unit::multiply(sums_, loaded.tiles[i], loaded.inputs[i]);
            if (--left_ == 0) store();
        }
    }

    // Stores the sums of a row tile and lane, and begins with the next.
    KCCL_DEVICE void store() {
        lane_.totals(sums_, [&](uint32_t row, uint32_t vector, float sum) {
            if (vector == 0 && row < kTileRows) mem::store_plain(area_ + row, sum);
        });
        area_ += kTileRows;
        sums_ = {};
        left_ = steps_.each;
    }

    Worker<S>& worker_;
    const Steps steps_;
    const typename Unit::Lane lane_;
    const uint32_t warp_;
    const StagedQuad* const staged_;
    float* area_;
    uint32_t at_ = 0;  // the next step's number within all lanes
    uint32_t left_;    // steps of this row tile and lane
    typename Unit::Sums sums_ = {};
};

// One product of the block: see Multiplier::run(). All threads of the warp.
template <class S>
KCCL_DEVICE void multiply(Worker<S>& worker, const Steps& steps, const FirstStage<S>& first) {
    if (steps.num == 0) return;
    Multiplier<S> multiplier(worker, steps);
    multiplier.run(first);
}

// ---- Rows ---------------------------------------------------------------------------------------

// The k-th quad of a block's rows that this thread finishes; it may lie behind the last one. Quads
// go round the warps, so that all warps have some.
template <class S>
KCCL_DEVICE uint32_t own_quad(const Worker<S>& worker, uint32_t k) {
    return (k * platform::kWarpSize + worker.thread()) * S::kWarps + worker.warp_index();
}

// The sums of all warps, in their order, for four rows: quad `quad` of row tile and lane `tile`.
template <class S>
KCCL_DEVICE Quad total_of(Worker<S>& worker, uint32_t tile, uint32_t quad) {
    Quad total = {};
    KCCL_UNROLL
    for (uint32_t each = 0; each < S::kWarps; ++each) {
        const Quad part = mem::load_plain(worker.area(each) + tile * kTileQuads + quad);
        KCCL_UNROLL
        for (int i = 0; i < 4; ++i) total.value[i] += part.value[i];
    }
    return total;
}

}  // namespace kccl::decode
