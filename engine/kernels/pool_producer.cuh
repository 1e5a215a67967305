// Copies stages into the slots of a ring in another order than its own (pool_order.cuh). A stage
// may be gathered from several pieces of memory.
#pragma once

#include "pool_order.cuh"

namespace kccl::decode {

// All threads of the producer warp make an object and call each function together. Each thread
// looks at the barriers of one slot, so a look at all of them takes two instructions.
template <class Ring>
class PoolProducer {
  public:
    KCCL_DECODE explicit PoolProducer(Ring& ring) : ring_(ring) {}

    KCCL_DECODE PoolOrder<Ring::kStages>& order() { return order_; }

    // Tells whether the next stage's slot is free, and fewer than `in_flight` copies are in flight.
    // Looks at the barriers only if it was not so at the last look.
    KCCL_DECODE bool may_begin(uint32_t in_flight) {
        if (is_ready(in_flight)) return true;
        look();
        return is_ready(in_flight);
    }

    // Returns bits: whether a copy into slot i is in flight at this moment.
    KCCL_DECODE uint32_t slots_in_flight() {
        look();
        return flying_;
    }

    // Tells whether a slot was free at the last look: never filled, or used since it was filled.
    KCCL_DECODE bool was_free(uint32_t slot) const { return (free_ >> slot & 1u) != 0; }

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
        free_ &= ~(1u << order_.slot());
        flying_ |= 1u << order_.slot();
        ++num_flying_;
        order_.advance();
    }

    // Waits until no copy is in flight: Producer::drain() in ring.cuh.
    KCCL_DECODE void drain() {
        while (slots_in_flight() != 0) mem::poll_pause();
    }

  private:
    static_assert(Ring::kStages <= platform::kWarpSize, "a thread for each slot");
    static_assert(Ring::kStages < 32, "a bit for each slot");

    KCCL_DECODE bool is_ready(uint32_t in_flight) const {
        return was_free(order_.slot()) && num_flying_ < in_flight;
    }

    // Finds out which slots are free, and which copies are in flight.
    KCCL_DECODE void look() {
        const uint32_t slot = least_of(warp().index(), Ring::kStages - 1);
        const uint32_t parity = order_.last_parity(slot);
        constexpr uint32_t kAll = (1u << Ring::kStages) - 1;
        free_ = static_cast<uint32_t>(
                    platform::warp_ballot(mem::has_completed_now(&ring_.empty[slot], parity))) &
                kAll;
        // What one thread has seen comes before the copies that another one begins.
        warp().sync();
        if (flying_ == 0) return;
        flying_ &= ~static_cast<uint32_t>(
            platform::warp_ballot(mem::has_completed_now(&ring_.full[slot], parity)));
        num_flying_ = 0;
        KCCL_UNROLL
        for (uint32_t i = 0; i < Ring::kStages; ++i) num_flying_ += flying_ >> i & 1u;
    }

    Ring& ring_;
    PoolOrder<Ring::kStages> order_;
    uint32_t free_ = 0;        // bit i: slot i was free at the last look
    uint32_t flying_ = 0;      // bit i: at the last look, a copy into slot i was in flight
    uint32_t num_flying_ = 0;  // bits of flying_
    uint32_t num_bytes_ = 0;   // of the stage that is copied now
};

}  // namespace kccl::decode
