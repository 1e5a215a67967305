// signal: adds one to the peer's count of signals under an id. Releases what this rank's coop wrote
// before, puts included: the peer sees it after the wait for this signal.
//
// Each rank has a word of its own at the peer for each id. So a signal only stores the new count in
// it, and needs no remote atomic.
#pragma once

#include "../one_sided.cuh"

namespace kccl {

// Sends one signal to `peer` under `signal_id`. `peer`: from 0 to world_size - 1. `signal_id`: from
// 0 to kKcclNumSignals - 1, which is 63. With other arguments the call returns a failed status and
// sends nothing.
//
// Called by all threads of the coop (a thread, warp or block: coop.cuh). One coop at a time signals
// a peer under an id, because the count of signals sent is plain memory.
template <class Coop>
KCCL_DEVICE Status signal(Coop coop, const DeviceComm& comm, int peer, int signal_id) {
    begin_together<kCoopKind<Coop>>(
        comm, "signal",
        {{"peer", static_cast<uint64_t>(peer)}, {"signal_id", static_cast<uint64_t>(signal_id)}});
    const Status status = status_of(comm);
    if (coop.any(status != kKcclOk)) return status_of(comm);
    const Status found = check_signal(coop, comm, kKcclSignal, peer, signal_id, 0);
    if (found != kKcclOk) return found;
    coop.sync();
    if (leads(coop)) {
        const uint32_t sent = ++state_of(comm)->sent[peer][signal_id];
        mem::store<mem::Order::kRelease, mem::Scope::kSystem>(
            signal_word(comm, peer, signal_id, comm.rank), sent);
    }
    return kKcclOk;
}

namespace kernels {

KCCL_KERNEL void signal(KCCL_KERNEL_PARAM(KcclCall) parameter) {
    const KcclCall& call = platform::first_parameter(parameter);
    mem::await_kernels_before();
    kccl::signal(block(), call.comm, call.peer, call.channel);
}

}  // namespace kernels
}  // namespace kccl
