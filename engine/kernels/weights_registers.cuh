// Weights that each warp loads ahead into its own registers, past the caches. For machines whose
// copies into block-shared memory go through registers anyway, and which have more of these.
//
// When a stage has been multiplied, its registers take the next one. So a stage of each warp is on
// its way or there at any time: while ops end, while blocks wait for each other, from one layer and
// one token to the next. The block's weights lie in the order of their use, so the next stage is
// behind the last one; behind a round's end, it is the first one.
#pragma once

#include "shared.cuh"

namespace kccl::decode {

// See weights.cuh. It has no wait: what needs a register waits for the load into it.
template <class S>
class RegisterWeights {
  public:
    using Unit = Mma<typename S::Weight>;
    using Dims = Shape<S>;
    static_assert(!S::kTraces, "a stage has no moment at which it lands");
    static_assert(S::kAblated < kKcclDecodePinned,
                  "a product has no stages of its own to be pinned");

    KCCL_DEVICE RegisterWeights(const DeviceComm&, const Task& task, Shared<S>& shared)
        : shared_(shared) {
        const uint32_t block = platform::block_in_grid();
        of_layers_ = static_cast<uint32_t>(Dims::packed_by(Dims::member_of(block)) / S::kWarps *
                                           S::kNumLayers);
        num_ = of_layers_ + Dims::head_tiles_of(block).num * Dims::Head::kSteps;
        // A block without weights loads some others, and multiplies none.
        const uint64_t first = num_ != 0 ? Dims::stream_of(block) : 0;
        const uint32_t warp_index = platform::thread_in_block() / platform::kWarpSize;
        begin_ = reinterpret_cast<const uint8_t*>(task.weights) + (first + warp_index) * kTileBytes;
        if constexpr (S::kOverlaps) load();
    }

    KCCL_DEVICE void begin_round(bool has_head) { end_ = has_head ? num_ : of_layers_; }

    KCCL_DEVICE bool try_await(uint32_t) const { return false; }

    KCCL_DEVICE void await(uint32_t) {
        if constexpr (!S::kOverlaps) load();
    }

    KCCL_DEVICE typename Unit::Weights tile(const typename Unit::Lane&, uint32_t i) const {
        return tiles_[i];
    }

    KCCL_DEVICE void has_copied() {}

    // The stage may be short, at a product's end. What was loaded behind it is loaded again.
    KCCL_DEVICE void has_multiplied(uint32_t num) {
        next_ += least_of(num, S::kStageSteps);
        if (next_ == end_) next_ = 0;
        if constexpr (S::kOverlaps && (S::kAblated & kKcclDecodeNoWeights) == 0) load();
    }

    // Only what depends on loads makes the compiler keep them.
    KCCL_DEVICE void skip(uint32_t num) {
        await(0);
        const typename Unit::Lane lane(1, 0);
        typename Unit::Sums sums = {};
        KCCL_UNROLL
        for (uint32_t i = 0; i < S::kStageSteps; ++i) Unit::multiply(sums, tiles_[i], {});
        const uint32_t warp_index = platform::thread_in_block() / platform::kWarpSize;
        auto* const area = reinterpret_cast<float*>(shared_.area[0][warp_index]);
        lane.totals(sums, [&](uint32_t row, uint32_t, float sum) {
            if (row < kTileRows) mem::store_plain(area + row, sum);
        });
        has_multiplied(num);
    }

  private:
    // Begins to load the next stage. Behind the block's last step comes its first one.
    KCCL_DEVICE void load() {
        const typename Unit::Lane lane(1, 0);
        KCCL_UNROLL
        for (uint32_t i = 0; i < S::kStageSteps; ++i) {
            const uint64_t step = next_ + i < num_ ? next_ + i : 0;
            tiles_[i] = lane.streamed(begin_ + step * (S::kWarps * kTileBytes));
        }
    }

    Shared<S>& shared_;
    const uint8_t* begin_;  // of this warp's tiles
    // In steps: of all layers, and of a round with a head; where this round ends; and the next one.
    uint32_t of_layers_;
    uint32_t num_;
    uint32_t end_ = 0;
    uint32_t next_ = 0;
    typename Unit::Weights tiles_[S::kStageSteps];
};

}  // namespace kccl::decode
