// How the threads of a coop agree that the communicator has failed, and remember it.
//
// KcclState.status changes once, from ok to the reason of the first failure, and stays until reset
// (wait.cuh). Each thread of a coop reads it when a channel is opened. The threads may read
// different values, because the failure may come in between. So they vote before they act on it:
// agree(), once a channel. A later failure is found by the wait that fails.
//
// After a failure every later call returns the status and sends nothing.
#pragma once

#include "wait.cuh"

namespace kccl {

// A thread's part of it. All threads of the coop make one and call the same functions of it.
class FailureLatch {
  public:
    // Asks for the communicator's status, at the opening. The load is on its way when this returns.
    KCCL_DEVICE void ask(const DeviceComm& comm) { found_ = status_of(comm); }

    // Ok until fail().
    KCCL_DEVICE Status status() const { return status_; }

    // The vote: calls fail() when any thread of the coop found a failure. Also a sync of the coop:
    // it separates what the threads read when they opened the channel from what they write when
    // they close it. After the first time it does nothing.
    template <class Coop, class Fail>
    KCCL_DEVICE void agree(Coop coop, Fail fail) {
        if (has_agreed_) return;
        has_agreed_ = true;
        if (coop.any(found_ != kKcclOk)) fail();
    }

    // Whether the warp may send before the vote. If not, it reports that in Channel::leave().
    KCCL_DEVICE bool is_usable() const {
        return has_agreed_ || !platform::warp_any(found_ != kKcclOk);
    }
    // Channel::leave() votes too, so agree() need not.
    KCCL_DEVICE void skip_vote() { has_agreed_ = true; }

    // The communicator has failed, and stays so.
    KCCL_DEVICE void fail(const DeviceComm& comm) { status_ = status_of(comm); }

  private:
    bool has_agreed_ = false;
    Status found_;  // at the opening, by this thread
    Status status_ = kKcclOk;
};

}  // namespace kccl
