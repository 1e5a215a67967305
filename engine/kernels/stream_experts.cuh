// The producer warp of a mixture of experts: copies the stages of a block's weights into the ring
// in shared memory, as stream.cuh does in other models. Where the experts lie is known only when
// the block has chosen them. Stages that do not depend on the choice are copied before
// (pool_order.cuh).
#pragma once

#include "pool_producer.cuh"
#include "routing.cuh"
#include "weights_pool.cuh"

namespace kccl::decode {

// The steps of a product outside the experts that are left to be copied.
template <class S>
class DenseStages {
  public:
    KCCL_DECODE DenseStages(uint32_t block, Product<S> product)
        : product_(product), left_(steps_of_product<S>(block, product).num) {}

    KCCL_DECODE Product<S> product() const { return product_; }
    KCCL_DECODE bool has_next() const { return left_ + of_part_ > 0; }
    // Returns the steps of the next stage. In the head, no stage crosses from kHeadTiles row tiles
    // into the next ones.
    KCCL_DECODE uint32_t next() {
        constexpr uint32_t kOfHead = Shape<S>::kHeadTiles * Shape<S>::Head::kSteps;
        if (of_part_ == 0) {
            of_part_ = product_ == Product<S>::kHead ? least_of(left_, kOfHead) : left_;
            left_ -= of_part_;
        }
        const uint32_t steps = least_of(of_part_, stage_steps<S>(product_));
        of_part_ -= steps;
        return steps;
    }

  private:
    Product<S> product_;
    uint32_t left_;
    uint32_t of_part_ = 0;
};

// Returns the product that a block reads behind the experts of a layer.
template <class S>
KCCL_CONSTEXPR Product<S> product_behind_experts(uint32_t layer) {
    return layer + 1 < S::kNumLayers ? Product<S>::kQkv : Product<S>::kHead;
}

// Calls take(num_bytes) for each stage of a block's token step, in the order of their use. Between
// them, tells `weights` where products begin and end.
template <class S, class Weights, class Take>
KCCL_DECODE void for_each_used_stage(uint32_t block, Weights& weights, Take take) {
    for (uint32_t i = 0; i <= kTurnsOfLayers<S>; ++i) {
        const Turn<S> turn = turn_at<S>(i < kTurnsOfLayers<S> ? i : 0);
        const Product<S> product = i < kTurnsOfLayers<S> ? turn.product : Product<S>::kHead;
        weights.begin_product(block, turn.layer, product);
        for (DenseStages<S> stages(block, product); stages.has_next();) take(stages.next());
        weights.end_product(product);
    }
}

template <class S>
class MixtureStream {
  public:
    using Dims = Shape<S>;
    using GateUp = typename Dims::ExpertGateUp;
    using Down = typename Dims::ExpertDown;

    KCCL_DECODE MixtureStream(const DeviceComm& comm, const Task& task, Shared<S>& shared)
        : task_(task),
          shared_(shared),
          producer_(shared.ring),
          watch_(comm, task, &shared.gave_up),
          trace_(task),
          weights_(reinterpret_cast<const uint8_t*>(task.weights)) {}

    // Copies the stages of a token step. Returns false if the consumer warps have ended.
    KCCL_DECODE bool copy_token_step(bool has_head) {
        const uint32_t block = platform::block_in_grid();
        from_ = weights_ + Dims::stream_of(block) * kUnitBytes<S>;
        DenseStages<S> stages(block, Product<S>::kQkv);
        const uint32_t num_turns = kTurnsOfLayers<S> + (has_head ? 1 : 0);
#pragma unroll 1
        for (uint32_t i = 0; i < num_turns; ++i) {
            const bool is_head = i == kTurnsOfLayers<S>;
            const Turn<S> turn = turn_at<S>(is_head ? 0 : i);
            const Product<S> product = is_head ? Product<S>::kHead : turn.product;
            // How many stages outside the experts are copied now.
            uint32_t most = ~0u;
            const uint32_t of_experts = num_stages_of<GateUp>() + num_stages_of<Down>();
            if (product == Product<S>::kExpertGateUp) {
                most = parked_ = num_parked<S>(block, turn.layer, has_head);
                stages = DenseStages<S>(block, product_behind_experts<S>(turn.layer));
                trace_.skip(of_experts);
            } else if (product == Product<S>::kExpertDown) {
                most = 0;
            } else if (product != Product<S>::kQkv && !is_head) {
                stages = DenseStages<S>(block, product);
            }
            begin_product();
            // One loop copies those of all products, so that its code exists once.
#pragma unroll 1
            for (; most > 0 && stages.has_next(); --most) {
                if (!copy_dense(stages)) return false;
            }
            if (product == Product<S>::kExpertGateUp) {
                trace_.go_back(of_experts + parked_);
                if (!await_choice(turn.layer)) return false;
                producer_.order().begin_experts_behind(parked_);
                if (!copy_experts<GateUp>(turn, ExpertMemory<S>::kGateUpAt)) return false;
            } else if (product == Product<S>::kExpertDown) {
                if (!copy_experts<Down>(turn, ExpertMemory<S>::kDownAt)) return false;
                producer_.order().end_experts();
                trace_.skip(parked_);
            }
        }
        trace_.end_token_step();
        return true;
    }

    KCCL_DECODE void drain() { producer_.drain(); }

  private:
    KCCL_DECODE void begin_product() {
        num_asked_ = 0;
        is_urgent_ = false;
    }

    // Returns how many stages of a product of experts this block has.
    template <class M>
    KCCL_DECODE static uint32_t num_stages_of() {
        const Cut tiles = M::tiles_of(Dims::block_in_group_of(platform::block_in_grid()));
        return ceil_div(tiles.num * M::kAllSteps, M::kStageSteps);
    }

    KCCL_DECODE bool copy_dense(DenseStages<S>& stages) {
        const uint32_t num_bytes = stages.next() * step_bytes<S>(stages.product());
        if (!begin_stage(num_bytes)) return false;
        copy(from_, num_bytes);
        from_ += num_bytes;
        producer_.end();
        return true;
    }

    // Copies the stages of the block's rows of a product of experts. in_layer: where the product's
    // matrices of a layer begin, in units of kUnitBytes.
    template <class M>
    KCCL_DECODE bool copy_experts(const Turn<S>& turn, uint64_t in_layer) {
        begin_product();
        // Urgent at once: that delays the next exchange, of the activations, but the time of a
        // token is less (bench/LOG.md).
        is_urgent_ = true;
        const uint32_t block = Dims::block_in_group_of(platform::block_in_grid());
        const Cut tiles = M::tiles_of(block);
        const uint8_t* const from = weights_ + (Dims::stream_of(S::kBlocks) +
                                                turn.layer * ExpertMemory<S>::kLayer + in_layer) *
                                                   kUnitBytes<S>;
        const uint32_t num = tiles.num * M::kAllSteps;
        for (uint32_t step = 0; step < num;) {
            const uint32_t end = least_of(num, step + M::kStageSteps);
            if (!begin_stage((end - step) * M::kStepBytes)) return false;
            while (step < end) {
                const Piece piece = M::piece_at(tiles.first, step);
                const uint32_t steps = least_of(piece.num, end - step);
                const uint64_t expert = platform::shuffle_word(chosen_, piece.place);
                copy(from + expert * M::kUnitsOfOne * kUnitBytes<S> +
                         uint64_t{piece.first} * M::kStepBytes,
                     steps * M::kStepBytes);
                step += steps;
            }
            producer_.end();
        }
        return true;
    }

    // Waits for the block's choice of experts in a layer, and keeps it: this thread has the expert
    // of the place that has its number. Returns false if the consumer warps have ended.
    KCCL_DECODE bool await_choice(uint32_t layer) {
        const uint32_t place = warp().index();
        // Where weights are only read, nothing is routed. These experts are as far from each other.
        chosen_ = (place * (S::kExperts / S::kPlaces) + layer) % S::kExperts;
        // A block without rows of experts copies none. Its consumer warps would not wait for it,
        // and might write the next layer's choice while it reads this one.
        const uint32_t block = Dims::block_in_group_of(platform::block_in_grid());
        if (task_.only_reads != 0 || GateUp::tiles_of(block).num + Down::tiles_of(block).num == 0) {
            return true;
        }
        // The hardware may suspend the warp meanwhile, so that warp 0, which makes the choice, can
        // issue more instructions.
        while (platform::warp_any(!mem::has_completed(&shared_.has_chosen, chosen_parity_))) {
            if (have_ended()) return false;
        }
        chosen_parity_ ^= 1u;
        if (place < S::kPlaces) chosen_ = mem::load_plain(&shared_.choice.expert[place]);
        // All threads have read it before one begins a copy, whose end the consumers await.
        warp().sync();
        return true;
    }

    // Waits until the next stage may be copied, and begins it. Returns false if the consumer warps
    // have ended.
    KCCL_DECODE bool begin_stage(uint32_t num_bytes) {
        // A trace needs the time at which each stage has landed.
        while (!is_asked_for() || !producer_.template may_begin<!S::kTraces>(bound())) {
            if (have_ended()) return false;
        }
        constexpr bool kHasNone = (S::kAblated & kKcclDecodeNoWeights) != 0;
        is_first_piece_ = true;
        // This stage may take the very slot that tells.
        notice_urgency();
        // The slot of the product's second stage tells when copies become urgent.
        if (++num_asked_ == 2) second_ = producer_.order().slot();
        producer_.begin(kHasNone ? 16 : num_bytes);
        if constexpr (S::kTraces) {
            trace_.see(producer_.slots_in_flight());
            trace_.ask(producer_.order().slot());
        }
        asked_parity_ ^= 1u;
        return true;
    }
    KCCL_DECODE void copy(const uint8_t* from, uint32_t num_bytes) {
        if constexpr ((S::kAblated & kKcclDecodeNoWeights) != 0) {
            if (is_first_piece_) producer_.copy(from, 16);
        } else {
            producer_.copy(from, num_bytes);
        }
        is_first_piece_ = false;
    }

    // Returns how many copies may be in flight.
    KCCL_DECODE uint32_t bound() {
        notice_urgency();
        return is_urgent_ ? S::kUrgentInFlight : S::kInFlight;
    }
    // Copies of experts are urgent from the first on (copy_experts). Others are when the warps have
    // freed two stages of their product: stream.cuh says why.
    KCCL_DECODE void notice_urgency() {
        is_urgent_ = is_urgent_ || (num_asked_ > 1 && producer_.is_free(second_));
    }
    KCCL_DECODE bool is_asked_for() const {
        return S::kOverlaps ||
               !platform::warp_any(!mem::has_completed_now(&shared_.asked, asked_parity_));
    }
    KCCL_DECODE bool have_ended() {
        if (platform::warp_any(mem::has_completed_now(&shared_.ended, 0))) return true;
        if constexpr (S::kTraces) trace_.see(producer_.slots_in_flight());
        watch_.look();
        mem::poll_pause();
        return false;
    }

    const Task& task_;
    Shared<S>& shared_;
    PoolProducer<WeightRing<S>> producer_;
    Watch<S> watch_;
    PoolTrace<S, WeightRing<S>::kStages> trace_;
    const uint8_t* const weights_;
    const uint8_t* from_ = nullptr;  // the next stage outside the experts
    uint32_t num_asked_ = 0;         // the stages of this product that have been copied
    uint32_t second_ = 0;
    uint32_t asked_parity_ = 0, chosen_parity_ = 0;
    uint32_t chosen_ = 0;  // await_choice()
    uint32_t parked_ = 0;  // the stages of the layer that are parked
    bool is_urgent_ = false, is_first_piece_ = true;
};

// Runs the producer warp: see stream() in stream.cuh.
template <class S>
KCCL_DECODE void stream_mixture(const DeviceComm& comm, const Task& task, Shared<S>& shared) {
    static_assert(S::kAblated < kKcclDecodePinned, "an expert has no place of its own");
    MixtureStream<S> stream(comm, task, shared);
    for (uint32_t position = task.start;; ++position) {
        if (!stream.copy_token_step(wants_head(task, position))) break;
    }
    stream.drain();
}

}  // namespace kccl::decode
