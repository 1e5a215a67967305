// Lets the threads of a coop agree that the communicator has failed, and remember it.
//
// KcclState.status changes once, from ok to the reason of the first failure, and stays until reset
// (wait.cuh). Each thread of a coop reads it when a channel is opened. The threads may read
// different values, because the failure may come between their reads. So they vote in agree(), once
// per opening, before they act on what they read. A failure that comes later is found by a wait,
// which then fails.
//
// After fail() every later call of this coop returns the status and sends nothing. In the call that
// finds the failure, warps that had read ok may still send. reset() waits for the kernel before it
// clears.
#pragma once

#include "refuse.cuh"

namespace kccl {

// A program that only launches a graph again makes no call that could tell it of a failure, and
// would go on with wrong data. So the builder of libkccl_nccl.so defines KCCL_HOLDS_FAILED: there,
// calls in graphs, which use all channels but the first, end after a failure only when the host
// interrupts them, as NCCL's do.
#if defined(KCCL_HOLDS_FAILED)
KCCL_DEVICE_COLD void hold_failed(const DeviceComm& comm, int channel) {
    constexpr uint64_t kBetweenLooksNs = 1000000;
    uint32_t gone = 0;
    while (channel != 0 &&
           mem::idle(state_of(comm)->idle_context, 0, 0, &gone) != kKcclInterrupted) {
        const uint64_t looked_ns = mem::clock_ns();
        while (mem::clock_ns() - looked_ns < kBetweenLooksNs) mem::poll_pause();
    }
}
#else
KCCL_DEVICE void hold_failed(const DeviceComm&, int) {}
#endif

// One thread's part of the latch. All threads of the coop make an object and call the same
// functions of it.
class FailureLatch {
  public:
    // Starts to load the communicator's status, when the channel is opened. Does not wait for the
    // load.
    KCCL_DEVICE void ask(const DeviceComm& comm) { found_ = status_of(comm); }

    // Notes that an argument of the opening was refused, so that the coop makes no calls. Called by
    // all threads of the coop (a thread, warp or block: coop.cuh), instead of ask(). The coop's
    // leader has already written the record.
    KCCL_DEVICE void refuse() { found_ = kKcclBadArgument; }

    // Tells whether this thread has found no failure.
    KCCL_DEVICE bool is_ok() const { return found_ == kKcclOk && status_ == kKcclOk; }

    // Returns ok until fail() is called, then the communicator's failed status.
    KCCL_DEVICE Status status() const { return status_; }

    // Lets the coop's threads vote. Returns false if a thread of the coop found a failure; then the
    // caller must call fail(). The vote is also a sync of the coop: it separates what the threads
    // read when they opened the channel from what they write when they close it. Later calls return
    // true and do nothing.
    template <class Coop>
    KCCL_DEVICE bool agree(Coop coop) {
        if (has_agreed_) return true;
        has_agreed_ = true;
        return !coop.any(found_ != kKcclOk);
    }

    // Tells whether this thread's warp may send before the vote: none of its threads found a
    // failure. If it may not, its threads end the call with Channel::leave(true).
    KCCL_DEVICE bool is_usable() const {
        return has_agreed_ || !has_failed_in_warp(found_ != kKcclOk);
    }
    // Makes agree() vote no more, because Channel::leave() votes too.
    KCCL_DEVICE void skip_vote() { has_agreed_ = true; }

    // Stores the communicator's failed status, which status() returns from now on. channel: that of
    // the call.
    KCCL_DEVICE void fail(const DeviceComm& comm, int channel) {
        status_ = status_of(comm);
        hold_failed(comm, channel);
    }

  private:
    bool has_agreed_ = false;
    Status found_;  // the status that this thread read when the channel was opened
    Status status_ = kKcclOk;
};

}  // namespace kccl
