// Weights that each warp loads ahead into its own registers, past the caches. This suits machines
// that copy to block-shared memory through registers anyway, and have many registers.
//
// When a stage (some tiles for each warp) has been multiplied, its registers take the next one. So
// each warp always has a stage loaded or on its way, even while ops end and while blocks wait for
// each other. The block's weights lie in the order of their use, so the next stage lies behind the
// last one. Behind the end of a token step comes the first stage.
#pragma once

#include "shared.cuh"

namespace kccl::decode {

// The formats of a stage, which is loaded before its product is known: that of all products of the
// layers, and the head's. Formats of 16 bits have tiles of one size, and so count as one. Products
// of experts do not count, because their stages are loaded later (weights_registers_experts.cuh).
template <class S>
struct StageFormats {
    using OfLayers = typename S::Formats::First;
    using HeadFormat = typename Shape<S>::Head::Format;

    template <class... M>
    KCCL_CONSTEXPR static bool have_no_scales(Matrices<M...>) {
        uint32_t i = 0;
        return ((is_of_experts(i++) || !kHasScales<typename M::Format>) && ...);
    }
    template <class... M>
    KCCL_CONSTEXPR static bool have_one(Matrices<M...>) {
        uint32_t i = 0;
        return ((is_of_experts(i++) || kIsSame<typename M::Format, OfLayers>) && ...);
    }
    KCCL_CONSTEXPR static bool is_of_experts(uint32_t i) {
        return (that_have_experts<S>() >> i & 1u) != 0;
    }

    static constexpr bool kAreOne = !kHasScales<HeadFormat> && have_no_scales(Products<S>{});
    using OfHead = typename If<kAreOne, OfLayers, HeadFormat>::Type;
};

// weights.cuh says what the functions do. There is no explicit wait for a load: an instruction that
// uses the register waits for it.
template <class S>
class RegisterWeights {
  public:
    using First = typename StageFormats<S>::OfLayers;
    using Last = typename StageFormats<S>::OfHead;
    using Dims = Shape<S>;
    static_assert(!S::kTraces, "a stage has no moment at which it lands");
    static_assert(S::kAblated < kKcclDecodePinned,
                  "a product has no stages of its own to be pinned");
    static_assert(StageFormats<S>::kAreOne || StageFormats<S>::have_one(Products<S>{}),
                  "a stage of a layer is loaded before its product, and so its format, is known");

    KCCL_DECODE RegisterWeights(const DeviceComm&, const Task& task, Shared<S>& shared)
        : shared_(shared) {
        const uint32_t block = platform::block_in_grid();
        const uint64_t of_layers = Dims::packed_by(Dims::block_in_group_of(block)) * S::kNumLayers;
        of_layers_ = static_cast<uint32_t>(of_layers / (S::kWarps * kUnitsOf<First>));
        num_ = of_layers_ + Dims::head_tiles_of(block).num * Dims::Head::kSteps;
        // A block without weights loads some other block's, and multiplies none.
        const auto* const weights = reinterpret_cast<const uint8_t*>(task.weights);
        const uint64_t first = num_ != 0 ? Dims::stream_of(block) : 0;
        begin_ = weights + first * kUnitBytes<S> + warp_index() * kStripBytes<First>;
        if constexpr (!kHasOneFormat) {
            of_head_ =
                weights + (first + of_layers) * kUnitBytes<S> + warp_index() * kStripBytes<Last>;
        }
        // A compiler that knows the first step takes the tiles behind it for the first one or for
        // others. Then it waits for the first tile, and loads the others through the caches.
        next_ = mem::forget_uniform(0);
        if constexpr (S::kOverlaps) load();
    }

    KCCL_DECODE void begin_token_step(bool has_head) { end_ = has_head ? num_ : of_layers_; }

    template <class F>
    KCCL_DECODE bool try_await(uint32_t) const {
        return false;
    }

    template <class F>
    KCCL_DECODE void await(uint32_t) {
        if constexpr (!S::kOverlaps) load();
    }

    template <class F, class Lane>
    KCCL_DECODE Strip<F> strip(const Lane&, uint32_t i) const {
        return stage_.template strip<F>(i);
    }

    KCCL_DECODE void has_copied() {}

    // At a product's end the stage may have fewer steps than were loaded. The weights behind them
    // belong to the next product, and are loaded again with its first stage.
    KCCL_DECODE void has_multiplied(uint32_t num) {
        const uint32_t whole = is_of_head() ? kStageStepsOf<S, Last> : kStageStepsOf<S, First>;
        next_ += least_of(num, whole);
        if (next_ == end_) next_ = 0;
        if constexpr (S::kOverlaps && (S::kAblated & kKcclDecodeNoWeights) == 0) load();
    }

    KCCL_DECODE void skip(uint32_t num) {
        await<First>(0);
        if (is_of_head()) {
            multiply_unused<Last>();
        } else {
            multiply_unused<First>();
        }
        has_multiplied(num);
    }

  protected:
    KCCL_DECODE const Shared<S>& shared() const { return shared_; }
    KCCL_DECODE static uint32_t warp_index() {
        return platform::thread_in_block() / platform::kWarpSize;
    }

    // Multiplies the stage and stores sums that nobody reads, because the compiler keeps loads only
    // if something uses them.
    template <class F>
    KCCL_DECODE void multiply_unused() {
        const typename Mma<typename F::Operand>::Lane lane(1, 0);
        typename SumsOf<F>::Type sums = {};
        KCCL_UNROLL
        for (uint32_t i = 0; i < kStageStripsOf<S, F>; ++i) {
            const Strip<F> strip = stage_.template strip<F>(i);
            multiply_strips<F>(
                sums, &strip, [](uint32_t) { return typename Mma<typename F::Operand>::Inputs{}; });
        }
        auto* const area = reinterpret_cast<float*>(shared_.area[0][warp_index()]);
        lane.totals(sums, [&](uint32_t row, uint32_t, float sum) {
            if (row < kTileRows) mem::store_plain(area + row, sum);
        });
    }

    // Begins to load the next stage. Behind the last step of the block's weights comes the first
    // one.
    KCCL_DECODE void load() {
        if constexpr (kHasOneFormat) {
            load_steps<First>(begin_, next_, num_);
        } else if (is_of_head()) {
            load_steps<Last>(of_head_, next_ - of_layers_, num_ - of_layers_);
            // Clang would let both branches share their last stores, by way of private memory. Then
            // a wave would wait for its loads.
            (void)mem::forget_uniform(0);
        } else {
            load_steps<First>(begin_, next_, of_layers_);
        }
    }

    // Begins to load a stage in format F, whose i-th step for this warp is at step_at(i).
    template <class F, class StepAt>
    KCCL_DECODE void load_from(StepAt step_at) {
        using Unit = Mma<typename F::Operand>;
        const typename Unit::Lane lane(1, 0);
        KCCL_UNROLL
        for (uint32_t i = 0; i < kStageStripsOf<S, F>; ++i) {
            const uint8_t* const from = step_at(i * F::kStripTiles);
            if constexpr (kHasScales<F>) {
                const typename Unit::StreamingLane streaming(1, 0);
                stage_.template hold<F>(i, load_strip<F>(streaming, from));
            } else {
                stage_.template hold<F>(i, {{F::streamed(lane, from)}});
            }
        }
    }

  private:
    static constexpr bool kHasOneFormat = kIsSame<First, Last>;
    template <class F>
    static constexpr uint32_t kUnitsOf = kTileBytesOf<F> / kUnitBytes<S>;

    // Tells whether the loaded stage is the head's.
    KCCL_DECODE bool is_of_head() const { return !kHasOneFormat && next_ >= of_layers_; }

    // Begins to load the stage from step `next` on of `num` in format F. `begin`: where this warp's
    // first one begins.
    template <class F>
    KCCL_DECODE void load_steps(const uint8_t* begin, uint32_t next, uint32_t num) {
        load_from<F>([&](uint32_t i) {
            const uint64_t step = next + i < num ? next + i : 0;
            return begin + step * (S::kWarps * kTileBytesOf<F>);
        });
    }

    Shared<S>& shared_;
    const uint8_t* begin_;              // where this warp's tiles begin
    const uint8_t* of_head_ = nullptr;  // and those of the head, where it has another format
    // All counted in steps. of_layers_: the steps of all layers. num_: those of a token step with a
    // head. end_: where this token step ends. next_: the first step of the stage that is loaded.
    uint32_t of_layers_;
    uint32_t num_;
    uint32_t end_ = 0;
    uint32_t next_;
    HeldStage<S> stage_;
};

}  // namespace kccl::decode
