// Lets the threads of a coop agree that the communicator has failed, and remember it.
//
// KcclState.status changes once, from ok to the reason of the first failure, and stays until reset
// (wait.cuh). Each thread of a coop reads it when a channel is opened. The threads may read
// different values, because the failure may come in between. So they vote before they act on it:
// agree(), once a channel. A later failure is found by the wait that fails.
//
// After fail() every later call of this coop returns the status and sends nothing. In the call that
// finds the failure, warps that had read ok may still send. reset() waits for the kernel before it
// clears.
#pragma once

#include "refuse.cuh"

namespace kccl {

// One thread's part of the latch. All threads of the coop make an object and call the same
// functions of it.
class FailureLatch {
  public:
    // Loads the communicator's status, at the opening. The load is on its way when this returns.
    KCCL_DEVICE void ask(const DeviceComm& comm) { found_ = status_of(comm); }

    // Makes the coop refuse an argument of the opening, and make no calls. Called by all its
    // threads, instead of ask(). Its leader has made the record.
    KCCL_DEVICE void refuse() { found_ = kKcclBadArgument; }

    // Tells whether this thread has found no failure.
    KCCL_DEVICE bool is_ok() const { return found_ == kKcclOk && status_ == kKcclOk; }

    // Returns ok until fail().
    KCCL_DEVICE Status status() const { return status_; }

    // Votes. Returns false if a thread of the coop found a failure; then fail() must follow. It is
    // also a sync of the coop: it separates what the threads read when they opened the channel from
    // what they write when they close it. After the first time it does nothing.
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
    // Channel::leave() votes too, so agree() need not.
    KCCL_DEVICE void skip_vote() { has_agreed_ = true; }

    // Records that the communicator has failed, for good.
    KCCL_DEVICE void fail(const DeviceComm& comm) { status_ = status_of(comm); }

  private:
    bool has_agreed_ = false;
    Status found_;  // at the opening, by this thread
    Status status_ = kKcclOk;
};

}  // namespace kccl
