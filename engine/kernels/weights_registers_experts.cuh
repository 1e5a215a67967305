// Weights that each warp loads ahead into its own registers (weights_registers.cuh), in a mixture
// of experts.
//
// The weights of the experts lie elsewhere, at addresses that follow from the choice, and may have
// another format. The registers hold one stage. While the router's logits are exchanged, that is
// the next layer's first one. It gives way to the experts' first stage when the block has chosen,
// and is loaded again behind them.
#pragma once

#include "weights_registers.cuh"

namespace kccl::decode {

// weights.cuh says what the functions do.
template <class S>
class ExpertRegisterWeights : public RegisterWeights<S> {
    using Base = RegisterWeights<S>;
    using typename Base::Dims;

  public:
    KCCL_DECODE ExpertRegisterWeights(const DeviceComm& comm, const Task& task, Shared<S>& shared)
        : Base(comm, task, shared),
          only_reads_(task.only_reads != 0),
          experts_(reinterpret_cast<const uint8_t*>(task.weights) +
                   Dims::stream_of(S::kBlocks) * kUnitBytes<S>) {}

    KCCL_DECODE void begin_product(uint32_t, uint32_t layer, Product<S> product) {
        product_ = product;
        layer_ = layer;
        step_ = 0;
        // All warps have met since the choice was written.
        if constexpr (S::kOverlaps) {
            if (product == Product<S>::kExpertDown) load_experts();
        }
    }
    KCCL_DECODE void end_product(Product<S> product) {
        if (product == Product<S>::kExpertGateUp) chosen_parity_ ^= 1u;
        if (product != Product<S>::kExpertDown) return;
        product_ = Product<S>::kNone;
        if constexpr (S::kOverlaps) Base::load();
    }

    template <class F>
    KCCL_DECODE void await(uint32_t warp_index) {
        if (!is_of_experts()) return Base::template await<F>(warp_index);
        const bool is_first = product_ == Product<S>::kExpertGateUp && step_ == 0;
        if (is_first) await_choice();
        if (is_first || !S::kOverlaps) load_experts();
    }

    KCCL_DECODE void has_multiplied(uint32_t num) {
        if (!is_of_experts()) return Base::has_multiplied(num);
        step_ += least_of(num, stage_steps<S>(product_));
        if constexpr (S::kOverlaps) load_experts();
    }

    KCCL_DECODE void skip(uint32_t num) {
        if (!is_of_experts()) return Base::skip(num);
        with_format<S>(product_, Skip{this});
        has_multiplied(num);
    }

  private:
    struct Skip {
        template <class F>
        KCCL_DECODE void run() const {
            weights->template await<F>(0);
            weights->template multiply_unused<F>();
        }
        ExpertRegisterWeights* weights;
    };

    KCCL_DECODE bool is_of_experts() const { return is_one_of<that_have_experts<S>()>(product_); }

    // Waits until warp 0 has written the choice. The wait ends: warp 0 chooses even if its own wait
    // for the logits has failed.
    KCCL_DECODE void await_choice() const {
        if (only_reads_) return;
        const mem::CopyBarrier* const has_chosen = &Base::shared().has_chosen;
        while (platform::warp_any(!mem::has_completed(has_chosen, chosen_parity_))) {
            mem::poll_pause();
        }
    }

    // Begins to load the next stage of a product of experts, if one is left.
    KCCL_DECODE void load_experts() {
        if constexpr ((S::kAblated & kKcclDecodeNoWeights) != 0) return;
        if (product_ == Product<S>::kExpertGateUp) {
            load_of<typename Dims::ExpertGateUp>(ExpertMemory<S>::kGateUpAt);
        } else {
            load_of<typename Dims::ExpertDown>(ExpertMemory<S>::kDownAt);
        }
    }

    // in_layer: where the product's matrices of a layer begin, in units of kUnitBytes.
    template <class M>
    KCCL_DECODE void load_of(uint64_t in_layer) {
        using F = typename M::Format;
        const Cut tiles = M::tiles_of(Dims::block_in_group_of(platform::block_in_grid()));
        const uint32_t num = tiles.num * M::kAllSteps;
        if (step_ >= num) return;
        const uint64_t layer = layer_ * ExpertMemory<S>::kLayer + in_layer;
        const uint8_t* const experts = experts_ + Base::warp_index() * kStripBytes<F>;
        Base::template load_from<F>([&](uint32_t i) {
            // Behind the last strip comes the last one again.
            const uint32_t step = least_of(step_ + i, num - F::kStripTiles);
            const Piece piece = M::piece_at(tiles.first, step);
            const uint64_t unit = layer + expert_at(piece.place) * M::kUnitsOfOne;
            return experts + unit * kUnitBytes<S> + uint64_t{piece.first} * M::kStepBytes;
        });
    }

    KCCL_DECODE uint64_t expert_at(uint32_t place) const {
        // Where weights are only read, nothing is routed. These experts are as far from each other.
        if (only_reads_) return (place * (S::kExperts / S::kPlaces) + layer_) % S::kExperts;
        return mem::load_plain(&Base::shared().choice.expert[place]);
    }

    const bool only_reads_;
    const uint8_t* const experts_;  // where the first expert's weights begin
    // The product, its layer, and the first step of the stage that is loaded. kNone: none of a
    // layer's experts.
    Product<S> product_ = Product<S>::kNone;
    uint32_t layer_ = 0;
    uint32_t step_ = 0;
    uint32_t chosen_parity_ = 0;
};

}  // namespace kccl::decode
