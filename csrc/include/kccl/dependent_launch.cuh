// Overlaps a kernel that the host launches for one call with the kernels before and behind it on
// its stream, or in its graph. It uses CUDA's programmatic dependent launch.
//
//   before   Before its threads touch memory, they wait for the end of all kernels before it. So
//            the stores of those kernels into this rank's own window have been performed, and its
//            first call needs no fence.
//   behind   When its threads have sent what they send, the blocks of the next kernel may come onto
//            the device. There they wait for the end of this kernel, which still polls.
//   end      Its last call stores early what the next kernel must know. Then nothing is left to do
//            when the data has come.
#pragma once

#include "coop.cuh"

namespace kccl {

// One thread's part of the overlap. All threads of the coop make an object and call the same
// functions of it.
class DependentLaunch {
  public:
    // is_launch: the host launched this kernel for one call. Otherwise a user's kernel makes the
    // call, and this object does nothing.
    KCCL_DEVICE explicit DependentLaunch(bool is_launch)
        : is_launch_(is_launch), is_ordered_(is_launch && !platform::kCpu) {
        if (is_launch) mem::await_kernels_before();
    }

    KCCL_DEVICE bool is_launch() const { return is_launch_; }

    // Notes whether the next kernel is a programmatic dependent that may begin early, as the host
    // has said in KcclCall.dependent.
    KCCL_DEVICE void set_dependent(bool is_early) { has_dependent_ = is_early; }

    // Notes that a call begins. `last`: the KcclKernel of the previous call in this kernel;
    // kKcclNumKernels if this call is the first, which follows the end of earlier kernels.
    KCCL_DEVICE void begin_call(uint32_t last) { is_ordered_ &= last == kKcclNumKernels; }
    // Tells whether all stores of earlier calls come before those of this call, as if a fence stood
    // between them.
    KCCL_DEVICE bool is_ordered() const { return is_ordered_; }

    // Announces that the next call is the kernel's last, and that it calls sent().
    KCCL_DEVICE void expect_end() { is_ending_ = is_launch_; }
    KCCL_DEVICE bool is_ending() const { return is_ending_; }

    // Announces that this thread has sent all that it sends in this call. Called by all threads of
    // the coop (a thread, warp or block: coop.cuh). Returns true after expect_end(): then the
    // caller must store what the next kernel must know, and no thread of this kernel reads that
    // again. If the call fails after this, what is stored makes no difference: only reset() may
    // follow, and it clears everything.
    //
    // Of the calls of one stream, the blocks of at most one wait on the device: a call admits the
    // next call only after its own wait for the kernels before it. If a call admitted the next one
    // earlier, at its kernel's beginning, nothing would be gained (bench/LOG.md).
    template <class Coop>
    KCCL_DEVICE bool sent(Coop coop) {
        if (has_dependent_) mem::launch_dependents();
        if (!is_ending_) return false;
        // The leader overwrites the state only after all threads have read it.
        coop.sync();
        is_stored_ = true;
        return true;
    }
    KCCL_DEVICE bool is_stored() const { return is_stored_; }

  private:
    bool is_launch_;
    bool is_ordered_;
    bool has_dependent_ = false;
    bool is_ending_ = false;
    bool is_stored_ = false;
};

}  // namespace kccl
