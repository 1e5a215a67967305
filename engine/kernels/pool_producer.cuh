// Copies stages into the slots of a ring in another order than its own (pool_order.cuh). A stage
// may be gathered from several pieces of memory.
#pragma once

#include "pool_order.cuh"

namespace kccl::decode {

// All threads of the producer warp make an object and call each function together. They look only
// at the barriers that the next stage waits for, and the hardware may suspend them meanwhile. So a
// stage takes few instructions, and polls take none from the consumer warps.
template <class Ring>
class PoolProducer {
  public:
    KCCL_DECODE explicit PoolProducer(Ring& ring) : ring_(ring) {}

    KCCL_DECODE PoolOrder<Ring::kStages>& order() { return order_; }

    // Tells whether the next stage's slot is free, and fewer than `in_flight` copies are in flight.
    // Copies count as landed in the order in which they began. MAY_SUSPEND: whether the answer may
    // come late.
    template <bool MAY_SUSPEND>
    KCCL_DECODE bool may_begin(uint32_t in_flight) {
        if (!has_ended<MAY_SUSPEND>(ring_.empty, order_.slot())) return false;
        const uint32_t most = least_of(in_flight, Ring::kStages);
        while (num_flying_ >= most) {
            // If its slot has been taken again, this is the later copy, which lands, too.
            const auto oldest = static_cast<uint32_t>(begun_ >> (num_flying_ - 1) * kBits) & kMask;
            if (!has_ended<MAY_SUSPEND>(ring_.full, oldest)) return false;
            --num_flying_;
        }
        return true;
    }

    // Returns bits: whether a copy into slot i is in flight at this moment.
    KCCL_DECODE uint32_t slots_in_flight() {
        const uint32_t slot = least_of(warp().index(), Ring::kStages - 1);
        const auto flying = static_cast<uint32_t>(platform::warp_ballot(
            !mem::has_completed_now(&ring_.full[slot], order_.last_parity(slot))));
        return flying & ((1u << Ring::kStages) - 1);
    }

    // Tells whether a slot is free at this moment: never filled, or used since it was filled.
    KCCL_DECODE bool is_free(uint32_t slot) const { return has_ended<false>(ring_.empty, slot); }

    // Begins to copy a stage of `num_bytes` bytes. Its pieces follow: copy(), for all bytes.
    KCCL_DECODE void begin(uint32_t num_bytes) {
        if (leads(warp())) mem::arrive_expecting(&ring_.full[order_.slot()], num_bytes);
        num_bytes_ = 0;
    }
    KCCL_DECODE void copy(const uint8_t* from, uint32_t num_bytes) {
        const uint32_t slot = order_.slot();
        mem::copy_async(ring_.stage[slot] + num_bytes_, from, num_bytes, &ring_.full[slot],
                        warp().index(), warp().size());
        num_bytes_ += num_bytes;
    }
    KCCL_DECODE void end() {
        begun_ = begun_ << kBits | order_.slot();
        ++num_flying_;
        order_.advance();
    }

    // Waits until no copy is in flight: Producer::drain() in ring.cuh.
    KCCL_DECODE void drain() {
        while (slots_in_flight() != 0) mem::poll_pause();
    }

  private:
    static_assert(Ring::kStages <= platform::kWarpSize, "a thread for each slot");
    // begun_ has so many bits for each copy, and holds the last 16.
    static constexpr uint32_t kBits = 4, kMask = (1u << kBits) - 1;
    static_assert(Ring::kStages <= 1u << kBits, "the number of a slot fits");

    // Tells whether the phase that a slot's last copy began has ended at one of its barriers.
    template <bool MAY_SUSPEND>
    KCCL_DECODE bool has_ended(const mem::CopyBarrier* barriers, uint32_t slot) const {
        const mem::CopyBarrier* const barrier = barriers + slot;
        const uint32_t parity = order_.last_parity(slot);
        return !platform::warp_any(!(MAY_SUSPEND ? mem::has_completed(barrier, parity)
                                                 : mem::has_completed_now(barrier, parity)));
    }

    Ring& ring_;
    PoolOrder<Ring::kStages> order_;
    uint64_t begun_ = 0;       // the slots of the last copies, the last one lowest
    uint32_t num_flying_ = 0;  // copies that may not have landed
    uint32_t num_bytes_ = 0;   // of the stage that is copied now
};

}  // namespace kccl::decode
