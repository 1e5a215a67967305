// Makes a call in a kernel refuse an argument. The rank then gives up (wait.cuh): its record has
// the argument, its value and its limit. The call has written nothing else.
//
// The arguments of a call are the same in all threads of its coop (a thread, warp or block:
// coop.cuh). So a check compares values that are uniform in a warp, and its branch is taken only if
// it fails.
#pragma once

#include "wait.cuh"

namespace kccl {

// Returns true for a number that is negative, or at or above its limit.
KCCL_DEVICE bool is_outside(int32_t number, int32_t limit) {
    return static_cast<uint32_t>(number) >= static_cast<uint32_t>(limit);
}

// An argument with which a call cannot be made.
struct Refused {
    KcclArgument argument;
    uint64_t value;  // an int64_t, if it can be negative
    uint64_t limit;
};

// Fails this rank because of the refused argument `why`. `channel`: the call's channel, or its
// signal_id. Called by one thread.
KCCL_DEVICE_COLD void refuse(const DeviceComm& comm, uint32_t kernel, int32_t channel,
                             const Refused& why) {
    give_up(comm, Record{kKcclBadArgument, comm.rank, comm.rank, kernel, channel,
                         static_cast<uint32_t>(why.limit), static_cast<uint32_t>(why.limit >> 32),
                         static_cast<uint32_t>(why.argument), why.value});
}

// Fails this rank because of a refused argument, in a call without a channel. Called by all threads
// of the coop; all get the status.
template <class Coop>
KCCL_DEVICE Status refuse_by(Coop coop, const DeviceComm& comm, KcclKernel kernel,
                             const Refused& why) {
    if (leads(coop)) refuse(comm, kernel, 0, why);
    coop.sync();
    return status_of(comm);
}

// Fails this rank because a call has more bytes than its DeviceComm allows. Called by one thread.
KCCL_DEVICE_COLD void refuse_length(const DeviceComm& comm, uint32_t kernel, int32_t channel,
                                    uint64_t num_bytes, uint64_t most) {
    constexpr uint64_t kMost = 0xffffffff;
    give_up(comm, Record{kKcclMessageTooLong, comm.rank, comm.rank, kernel, channel,
                         static_cast<uint32_t>(num_bytes < kMost ? num_bytes : kMost),
                         static_cast<uint32_t>(most), 0, 0});
}

}  // namespace kccl
