// Checks the arguments of one-sided calls.
#pragma once

#include "refuse.cuh"
#include "told.cuh"

namespace kccl {

// Refuses a copy if the `num_bytes` bytes at `address` do not lie in one window of some rank.
// Called by all threads of the coop (a thread, warp or block: coop.cuh); all get the status. Only
// the simulator knows the windows, so the other targets refuse nothing.
template <class Coop>
KCCL_DEVICE Status check_window(Coop coop, const DeviceComm& comm, KcclKernel kernel,
                                KcclArgument argument, const void* address, uint64_t num_bytes) {
    const uint64_t room = told::window_room(address);
    if (num_bytes <= room) return kKcclOk;
    if (room != 0) return refuse_by(coop, comm, kernel, {kKcclArgumentNumBytes, num_bytes, room});
    return refuse_by(coop, comm, kernel, {argument, reinterpret_cast<uint64_t>(address), 0});
}

// Refuses a peer that has no part of the window, or bytes from `offset` on that reach beyond the
// window. Called by all threads of the coop; all get the status.
template <class Coop>
KCCL_DEVICE Status check_part(Coop coop, const DeviceComm& comm, KcclKernel kernel,
                              const Window& window, int peer, uint64_t offset, uint64_t num_bytes) {
    // `peer` must be a rank of the window, which may have fewer ranks than the communicator.
    if (is_outside(peer, window.world_size)) {
        return refuse_by(coop, comm, kernel,
                         {kKcclArgumentPeer, uint64_t(int64_t{peer}), uint64_t(window.world_size)});
    }
    if (offset > window.num_bytes) {
        return refuse_by(coop, comm, kernel, {kKcclArgumentOffset, offset, window.num_bytes});
    }
    const uint64_t room = window.num_bytes - offset;
    if (num_bytes > room) {
        return refuse_by(coop, comm, kernel, {kKcclArgumentNumBytes, num_bytes, room});
    }
    return kKcclOk;
}

// Refuses a peer that is not from `least` to world_size - 1, or a signal_id that is not from 0 to
// kKcclNumSignals - 1. Called by all threads of the coop; all get the status.
template <class Coop>
KCCL_DEVICE Status check_signal(Coop coop, const DeviceComm& comm, KcclKernel kernel, int peer,
                                int signal_id, int least) {
    if (peer < least || peer >= comm.world_size) {
        return refuse_by(coop, comm, kernel,
                         {kKcclArgumentPeer, uint64_t(int64_t{peer}), uint64_t(comm.world_size)});
    }
    if (is_outside(signal_id, kKcclNumSignals)) {
        return refuse_by(
            coop, comm, kernel,
            {kKcclArgumentSignalId, uint64_t(int64_t{signal_id}), uint64_t{kKcclNumSignals}});
    }
    return kKcclOk;
}

}  // namespace kccl
