// The order in which stages of weights use the slots of the pool (the ring in shared memory) in a
// mixture of experts.
//
// Which experts a layer needs is known only behind its router. Stages that do not depend on it are
// copied meanwhile, though they are used behind the experts: they are *parked*. So copies and uses
// have two orders, and both are static.
//
//     copies:  ... router | parked: the next layer's first stages | experts | the rest ...
//     uses:    ... router | experts | parked | the rest ...
//
// Stages outside the experts take the slots in turn, in both orders alike, whether they are parked
// or not. Those of the experts take all slots but the parked ones, in turn, from the slot behind
// the parked ones on. So both roles compute each stage's slot. Not all slots are used equally
// often. So each role keeps, for each slot, whether it has used it an odd number of times: the
// parity of the phase that the next use ends (CopyBarrier).
#pragma once

#include "device.cuh"

namespace kccl::decode {

template <uint32_t SLOTS>
class PoolOrder {
  public:
    // The slot of the next stage, and the parity of the phase that its copy ends.
    KCCL_DECODE uint32_t slot() const { return slot_; }
    KCCL_DECODE uint32_t parity() const { return uses_ >> slot_ & 1u; }
    // Returns the parity of the phase that the last copy into a slot ends, or has ended.
    KCCL_DECODE uint32_t last_parity(uint32_t slot) const { return (uses_ >> slot & 1u) ^ 1u; }

    // Goes on to the next stage.
    KCCL_DECODE void advance() {
        uses_ ^= 1u << slot_;
        slot_ = behind(slot_, 1);
        if (slot_ == skipped_) slot_ = behind_skipped_;
    }

    // Begins the stages of a layer's experts. `parked` stages are parked: begin_experts_behind() is
    // for the role that has just copied them, begin_experts() for those that will use them next
    // behind the experts.
    KCCL_DECODE void begin_experts(uint32_t parked) {
        next_ = slot_;
        begin(slot_, behind(slot_, parked), parked);
    }
    KCCL_DECODE void begin_experts_behind(uint32_t parked) {
        next_ = slot_;
        begin(behind(slot_, SLOTS - parked), slot_, parked);
    }
    KCCL_DECODE void end_experts() {
        slot_ = next_;
        skipped_ = SLOTS;
    }

  private:
    KCCL_DECODE void begin(uint32_t first_parked, uint32_t first_of_experts, uint32_t parked) {
        slot_ = behind_skipped_ = first_of_experts;
        skipped_ = parked == 0 ? SLOTS : first_parked;
    }
    // Returns the slot that is `num` slots behind another; num is at most SLOTS.
    KCCL_CONSTEXPR static uint32_t behind(uint32_t slot, uint32_t num) {
        return slot + num < SLOTS ? slot + num : slot + num - SLOTS;
    }

    // These are all that advance() takes, so that a warp that frees a stage needs few instructions.
    uint32_t slot_ = 0;            // of the next stage
    uint32_t uses_ = 0;            // bit i: whether slot i was used an odd number of times
    uint32_t skipped_ = SLOTS;     // the first parked slot; SLOTS: none is skipped
    uint32_t behind_skipped_ = 0;  // the slot behind the parked ones
    uint32_t next_ = 0;            // among the experts: the slot of the next stage outside them
};

}  // namespace kccl::decode
