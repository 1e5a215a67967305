// Copies stages into the slots of a ring in another order than its own (pool_order.cuh). A stage
// may be gathered from several pieces of memory.
#pragma once

#include "pool_order.cuh"

namespace kccl::decode {

// All threads of the producer warp make an object and call each function together.
template <class Ring>
class PoolProducer {
  public:
    KCCL_DECODE explicit PoolProducer(Ring& ring) : ring_(ring) {}

    KCCL_DECODE PoolOrder<Ring::kStages>& order() { return order_; }

    // Tells whether the next stage's slot is free, and fewer than `in_flight` copies are in flight,
    // and fewer than there are slots: slots_ lists no more.
    KCCL_DECODE bool may_begin(uint32_t in_flight) {
        return num_in_flight() < least_of(in_flight, Ring::kStages) &&
               is_free(order_.slot(), order_.parity() ^ 1u);
    }

    // Returns the number of copies that are in flight at this moment.
    KCCL_DECODE uint32_t num_in_flight() {
        while (flying_ > 0 && has_landed()) {
        }
        return flying_;
    }

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
        slots_ |= uint64_t{order_.slot()} << 4 * flying_++;
        order_.advance();
    }

    // Tells whether the last copy into a slot has been used. parity: that of the phase which that
    // copy has ended.
    KCCL_DECODE bool is_free(uint32_t slot, uint32_t parity) const {
        return !platform::warp_any(!mem::has_completed_now(&ring_.empty[slot], parity));
    }

    // Waits until no copy is in flight: Producer::drain() in ring.cuh.
    KCCL_DECODE void drain() {
        while (flying_ > 0) {
            if (!has_landed()) mem::poll_pause();
        }
    }

  private:
    static_assert(Ring::kStages <= 16, "slots_ has 4 bits for each slot, and room for 16");

    KCCL_DECODE bool has_landed() {
        const auto slot = static_cast<uint32_t>(slots_ & 15u);
        if (platform::warp_any(
                !mem::has_completed_now(&ring_.full[slot], order_.last_parity(slot)))) {
            return false;
        }
        slots_ >>= 4;
        --flying_;
        return true;
    }

    Ring& ring_;
    PoolOrder<Ring::kStages> order_;
    uint64_t slots_ = 0;      // those of the copies in flight, the oldest in the lowest 4 bits
    uint32_t flying_ = 0;     // copies in flight
    uint32_t num_bytes_ = 0;  // of the stage that is copied now
};

}  // namespace kccl::decode
