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

// Holds this thread's part of a tile in registers, in any of the model's formats, which here have
// the same size. hold<F>() stores a part in format F, as<F>() returns it.
template <class S, bool IS_ONE = S::Formats::kIsOne>
struct Held {
    using Stored = typename S::Formats::First::Stored;
    template <class F>
    KCCL_DECODE const Stored& as() const {
        return stored;
    }
    template <class F>
    KCCL_DECODE void hold(const Stored& part) {
        stored = part;
    }
    Stored stored;
};
template <class S>
struct Held<S, false> {
    template <class F>
    KCCL_DECODE typename F::Stored as() const {
        struct Words {
            uint32_t word[sizeof(typename F::Stored) / sizeof(uint32_t)];
        } words;
        KCCL_UNROLL
        for (uint32_t i = 0; i < sizeof(words) / sizeof(uint32_t); ++i) words.word[i] = word[i];
        return platform::bit_cast<typename F::Stored>(words);
    }
    template <class F>
    KCCL_DECODE void hold(const typename F::Stored& part) {
        struct Words {
            uint32_t word[sizeof(typename F::Stored) / sizeof(uint32_t)];
        };
        const auto words = platform::bit_cast<Words>(part);
        KCCL_UNROLL
        for (uint32_t i = 0; i < sizeof(words) / sizeof(uint32_t); ++i) word[i] = words.word[i];
    }
    uint32_t word[(sizeof(typename S::Formats::First::Stored) + 3) / 4];
};

// weights.cuh says what the functions do. There is no explicit wait for a load: an instruction that
// uses the register waits for it.
template <class S>
class RegisterWeights {
  public:
    using First = typename S::Formats::First;
    using Unit = Mma<typename First::Operand>;
    using Dims = Shape<S>;
    static_assert(!S::kTraces, "a stage has no moment at which it lands");
    static_assert(S::kAblated < kKcclDecodePinned,
                  "a product has no stages of its own to be pinned");
    static_assert(S::Formats::kHaveOneSize,
                  "a stage is loaded before its product, and so its format, is known");
    static_assert(!kHasScales<First>, "scales would be loaded here, too");

    KCCL_DECODE RegisterWeights(const DeviceComm&, const Task& task, Shared<S>& shared)
        : shared_(shared) {
        const uint32_t block = platform::block_in_grid();
        of_layers_ = static_cast<uint32_t>(Dims::packed_by(Dims::block_in_group_of(block)) /
                                           S::kWarps * S::kNumLayers);
        num_ = of_layers_ + Dims::head_tiles_of(block).num * Dims::Head::kSteps;
        // A block without weights loads some other block's, and multiplies none.
        const uint64_t first = num_ != 0 ? Dims::stream_of(block) : 0;
        begin_ =
            reinterpret_cast<const uint8_t*>(task.weights) + (first + warp_index()) * kUnitBytes<S>;
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
        return {{tiles_[i].template as<F>()}};
    }

    KCCL_DECODE void has_copied() {}

    // At a product's end the stage may have fewer steps than were loaded. The weights behind them
    // belong to the next product, and are loaded again with its first stage.
    KCCL_DECODE void has_multiplied(uint32_t num) {
        next_ += least_of(num, S::kStageSteps);
        if (next_ == end_) next_ = 0;
        if constexpr (S::kOverlaps && (S::kAblated & kKcclDecodeNoWeights) == 0) load();
    }

    KCCL_DECODE void skip(uint32_t num) {
        await<First>(0);
        multiply_unused();
        has_multiplied(num);
    }

  protected:
    KCCL_DECODE const Shared<S>& shared() const { return shared_; }
    KCCL_DECODE static uint32_t warp_index() {
        return platform::thread_in_block() / platform::kWarpSize;
    }

    // Multiplies the stage and stores sums that nobody reads, because the compiler keeps loads only
    // if something uses them.
    KCCL_DECODE void multiply_unused() {
        const typename Unit::Lane lane(1, 0);
        typename Unit::Sums sums = {};
        KCCL_UNROLL
        for (uint32_t i = 0; i < S::kStageSteps; ++i) {
            Unit::multiply(sums, First::operand(tiles_[i].template as<First>()), {});
        }
        auto* const area = reinterpret_cast<float*>(shared_.area[0][warp_index()]);
        lane.totals(sums, [&](uint32_t row, uint32_t, float sum) {
            if (row < kTileRows) mem::store_plain(area + row, sum);
        });
    }

    // Begins to load the next stage. Behind the last step of the block's weights comes the first
    // one.
    KCCL_DECODE void load() {
        load_from([&](uint32_t i) {
            const uint64_t step = next_ + i < num_ ? next_ + i : 0;
            return begin_ + step * (S::kWarps * kUnitBytes<S>);
        });
    }

    // Begins to load a stage, whose i-th tile for this warp is at tile_at(i).
    template <class TileAt>
    KCCL_DECODE void load_from(TileAt tile_at) {
        const typename Unit::Lane lane(1, 0);
        KCCL_UNROLL
        for (uint32_t i = 0; i < S::kStageSteps; ++i) {
            tiles_[i].template hold<First>(First::streamed(lane, tile_at(i)));
        }
    }

  private:
    Shared<S>& shared_;
    const uint8_t* begin_;  // where this warp's tiles begin
    // All counted in steps. of_layers_: the steps of all layers. num_: those of a token step with a
    // head. end_: where this token step ends. next_: the first step of the stage that is loaded.
    uint32_t of_layers_;
    uint32_t num_;
    uint32_t end_ = 0;
    uint32_t next_;
    Held<S> tiles_[S::kStageSteps];
};

}  // namespace kccl::decode
