// A ring of stages in block-shared memory. One warp, the producer, copies global memory into the
// stages, ahead of its use. Other warps, the consumers, use the copies in the same order.
//
//     copy n uses stage n % STAGES
//     full[stage]     a barrier that ends a phase when the stage's bytes have arrived
//     empty[stage]    a barrier that ends a phase when every consumer has released the stage
//
// Before a copy, the producer waits for two conditions: the stage is free, and fewer than a given
// number of copies are in flight. That number may be smaller than the number of stages: copies in
// flight fill the memory system's queues and delay the block's polls, but copies that have arrived
// do not, and keep the consumers busy during an exchange.
//
// Each thread makes a Producer or a Consumer of its own, which counts copies in registers. In a
// block of one warp, each thread makes both, and calls try_push() between its calls of front().
#pragma once

#include "told.cuh"
#include "wait.cuh"

namespace kccl {

// The stages and barriers of a ring, in block-shared memory. A copy fills a stage or its beginning.
template <uint32_t STAGES, uint32_t STAGE_BYTES>
struct Ring {
    static_assert(STAGE_BYTES % 16 == 0, "copies are made in units of 16 bytes");
    static constexpr uint32_t kStages = STAGES;
    static constexpr uint32_t kStageBytes = STAGE_BYTES;

    alignas(128) uint8_t stage[STAGES][STAGE_BYTES];
    mem::CopyBarrier full[STAGES];
    mem::CopyBarrier empty[STAGES];
};

// Initialises the barriers of a ring, before its first use. Called once by all threads of the
// block. num_consumers: the number of consuming warps.
template <class Ring>
KCCL_DEVICE void init_ring(Block coop, Ring& ring, uint32_t num_consumers) {
    if (leads(coop)) {
        for (uint32_t stage = 0; stage < Ring::kStages; ++stage) {
            mem::init_copies(&ring.full[stage], 1);
            mem::init_copies(&ring.empty[stage], num_consumers);
        }
        mem::fence_copies();
    }
    coop.sync();
}

// The stage that a copy uses, and the parity of the round through the ring in which it uses it: the
// parity of the phase of full[stage] that this copy ends.
template <class Ring>
struct Turn {
    uint32_t stage = 0;
    uint32_t parity = 0;

    KCCL_DEVICE void advance() {
        if (++stage < Ring::kStages) return;
        stage = 0;
        parity ^= 1u;
    }
};

// The warp that copies into the ring. All its threads call all functions. Waits have the timeout of
// `comm`, and a wait that fails makes its rank give up (wait.cuh).
template <class Ring>
class Producer {
  public:
    KCCL_DEVICE Producer(Ring& ring, const DeviceComm& comm) : ring_(ring), comm_(comm) {}

    // Waits until the next stage is free and fewer than `in_flight` (1 or more) copies are in
    // flight, then starts to copy `num_bytes` bytes at `from` into the stage. num_bytes is from 16
    // to the length of a stage; it and `from` are multiples of 16. Returns ok, or why the wait
    // failed.
    KCCL_DEVICE Status push(const void* from, uint32_t num_bytes, uint32_t in_flight) {
        begin("Producer::push", from, num_bytes, in_flight);
        const auto poll = [&] { return start(from, num_bytes, in_flight); };
        const auto missing = [&] { return Missing{1u << comm_.rank, count_}; };
        const Awaited awaited = {kKcclNumKernels, 0, count_ + 1};
        return wait_until(comm_, awaited, poll, missing) ? kKcclOk : status_of(comm_);
    }

    // Starts the same copy as push(), but does not wait. Returns false if it could not start yet.
    KCCL_DEVICE bool try_push(const void* from, uint32_t num_bytes, uint32_t in_flight) {
        begin("Producer::try_push", from, num_bytes, in_flight);
        return start(from, num_bytes, in_flight);
    }

    // Returns the number of copies that are in flight at this moment. Does not wait.
    KCCL_DEVICE uint32_t num_in_flight() {
        while (flying_ > 0 && !platform::warp_any(!mem::has_completed_now(
                                  &ring_.full[oldest_.stage], oldest_.parity))) {
            oldest_.advance();
            --flying_;
        }
        return flying_;
    }

    // Tells whether the next `num` stages are free now; num is 1 to kStages. Does not wait.
    KCCL_DEVICE bool has_free_stages(uint32_t num) const {
        // Stages become free in their order, so it is enough to check the last of them.
        const uint32_t last = next_.stage + num - 1;
        const bool wraps = last >= Ring::kStages;
        return !platform::warp_any(!mem::has_completed_now(
            &ring_.empty[wraps ? last - Ring::kStages : last], next_.parity ^ (wraps ? 0u : 1u)));
    }

    // Waits until no copy is in flight. A block must not end before that. This wait has no timeout,
    // because copies wait for nobody and so always end.
    KCCL_DEVICE void drain() {
        while (flying_ > 0) {
            if (!has_landed()) mem::poll_pause();
        }
    }

  private:
    // Tells the simulator that the warp calls `name`. The simulator refuses arguments with which no
    // GPU can make the copy.
    KCCL_DEVICE void begin(const char* name, const void* from, uint32_t num_bytes,
                           uint32_t in_flight) const {
        if constexpr (!told::kIsTold) return;
        begin_together<CoopKind::kWarp>(
            comm_, name, {{"from", from}, {"num_bytes", num_bytes}, {"in_flight", in_flight}});
        constexpr const char* kUnits = "a multiple of {}, because copies are made in such units";
        const auto address = reinterpret_cast<uint64_t>(from);
        if (address % kUnit != 0) told::refuse_argument(name, "from", address, kUnits, kUnit);
        if (num_bytes == 0 || num_bytes % kUnit != 0) {
            told::refuse_argument(name, "num_bytes", num_bytes, kUnits, kUnit);
        }
        if (num_bytes > Ring::kStageBytes) {
            told::refuse_argument(name, "num_bytes", num_bytes, "at most {}, the bytes of a stage",
                                  Ring::kStageBytes);
        }
        if (in_flight == 0) told::refuse_argument(name, "in_flight", 0, "at least {}", 1);
    }

    KCCL_DEVICE bool start(const void* from, uint32_t num_bytes, uint32_t in_flight) {
        // The stage is free when its last copy has been consumed, in the phase of the other parity.
        // In the first round that phase counts as ended: see CopyBarrier.
        const bool is_free = mem::has_completed(&ring_.empty[next_.stage], next_.parity ^ 1u);
        if (platform::warp_any(!is_free)) return false;
        const uint32_t bound = in_flight < Ring::kStages ? in_flight : Ring::kStages;
        while (flying_ >= bound) {
            if (!has_landed()) return false;
        }
        const Warp coop = warp();
        mem::CopyBarrier* full = &ring_.full[next_.stage];
        if (leads(coop)) mem::arrive_expecting(full, num_bytes);
        mem::copy_async(ring_.stage[next_.stage], from, num_bytes, full, coop.index(), coop.size());
        next_.advance();
        ++flying_;
        ++count_;
        return true;
    }

    // Tells whether the oldest copy in flight has arrived. If so, counts it as in flight no more.
    KCCL_DEVICE bool has_landed() {
        const bool is_there = mem::has_completed(&ring_.full[oldest_.stage], oldest_.parity);
        if (platform::warp_any(!is_there)) return false;
        oldest_.advance();
        --flying_;
        return true;
    }

    static constexpr uint32_t kUnit = 16;

    Ring& ring_;
    const DeviceComm& comm_;
    Turn<Ring> next_;      // the turn of the next copy
    Turn<Ring> oldest_;    // the turn of the oldest copy in flight
    uint32_t flying_ = 0;  // copies in flight
    uint32_t count_ = 0;   // copies that have been started, modulo 2^32
};

// A warp that uses the copies of the ring. All its threads call all functions.
template <class Ring>
class Consumer {
  public:
    KCCL_DEVICE Consumer(Ring& ring, const DeviceComm& comm) : ring_(ring), comm_(comm) {}

    // Waits for the next copy and returns the address of its bytes, or null if the wait failed.
    // Returns the same address until pop().
    KCCL_DEVICE const uint8_t* front() {
        begin_together<CoopKind::kWarp>(comm_, "Consumer::front", {{"copy", count_}});
        bool is_there = false;
        const auto poll = [&] {
            is_there = mem::has_completed(&ring_.full[next_.stage], next_.parity);
            return is_there;
        };
        const auto missing = [&] { return Missing{is_there ? 0 : 1u << comm_.rank, count_}; };
        const Awaited awaited = {kKcclNumKernels, 0, count_ + 1};
        return wait_until(comm_, awaited, poll, missing) ? ring_.stage[next_.stage] : nullptr;
    }

    // Returns what front() returns, but never null: it waits without a timeout and without a check
    // for failures. Only for a ring whose producer copies until the consumers have ended.
    KCCL_DEVICE const uint8_t* await_front() {
        while (platform::warp_any(!mem::has_completed(&ring_.full[next_.stage], next_.parity))) {
            mem::poll_pause();
        }
        return ring_.stage[next_.stage];
    }

    // Returns the address of the next copy's bytes, as front() does, if they have arrived; else
    // null. Does not wait. All threads of the warp get the same address.
    KCCL_DEVICE const uint8_t* try_front() {
        const bool is_here = mem::has_completed_now(&ring_.full[next_.stage], next_.parity);
        return platform::warp_any(!is_here) ? nullptr : ring_.stage[next_.stage];
    }

    // Releases the stage of front(), so that the producer may overwrite it.
    KCCL_DEVICE void pop() {
        begin_together<CoopKind::kWarp>(comm_, "Consumer::pop", {{"copy", count_}});
        warp().sync();
        if (leads(warp())) mem::arrive(&ring_.empty[next_.stage]);
        next_.advance();
        ++count_;
    }

  private:
    Ring& ring_;
    const DeviceComm& comm_;
    Turn<Ring> next_;
    uint32_t count_ = 0;
};

}  // namespace kccl
