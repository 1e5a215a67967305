// Arrivals: ranks tell each other by epoch that they have reached a point, and wait for each other.
// A barrier is arrive() followed by await(); the simple protocols put their data movement between.
#pragma once

#include "signal.cuh"

namespace kccl {

// Tells every peer that this rank has reached `flag` in call `epoch`.
// Called by all threads of the coop. kRelease: what the coop's threads wrote before is visible to
// whoever awaits this epoch with kAcquire. kRelaxed orders nothing.
template <mem::Order order, class Coop>
KCCL_DEVICE void arrive(Coop coop, const Call& call, KcclFlag flag, uint32_t epoch) {
    const DeviceComm& comm = call.comm;
    if constexpr (order == mem::Order::kRelease) coop.sync();
    for (int peer = coop.index(); peer < comm.world_size; peer += coop.size()) {
        if (peer == comm.rank) continue;
        mem::store<order, mem::Scope::kSystem>(flag_word(comm, peer, call.channel, flag, comm.rank),
                                               epoch);
    }
}

// Waits until the peers [first, last) have reached `flag` in call `epoch` or a later one.
// Called by all threads of the coop; all get the same status. kAcquire: see arrive().
template <mem::Order order, class Coop>
KCCL_DEVICE Status await(Coop coop, const Call& call, KcclFlag flag, uint32_t epoch, int first,
                         int last) {
    const DeviceComm& comm = call.comm;
    Wait wait(call, epoch);
    uint32_t missing;
    uint32_t late_seen;
    do {
        missing = 0;
        late_seen = 0;
        for (int peer = first + coop.index(); peer < last; peer += coop.size()) {
            if (peer == comm.rank) continue;
            const uint32_t seen = mem::load<mem::Order::kRelaxed, mem::Scope::kSystem>(
                flag_word(comm, comm.rank, call.channel, flag, peer));
            if (has_reached(seen, epoch)) continue;
            if (missing == 0) late_seen = seen;
            missing |= 1u << peer;
        }
    } while (wait.again(missing, late_seen));
    if constexpr (order == mem::Order::kAcquire) {
        for (int peer = first + coop.index(); peer < last; peer += coop.size()) {
            if (peer == comm.rank) continue;
            (void)mem::load<mem::Order::kAcquire, mem::Scope::kSystem>(
                flag_word(comm, comm.rank, call.channel, flag, peer));
        }
    }
    return coop.any(wait.failed()) ? status_of(comm) : kKcclOk;
}

// The same for all peers.
template <mem::Order order, class Coop>
KCCL_DEVICE Status await(Coop coop, const Call& call, KcclFlag flag, uint32_t epoch) {
    return await<order>(coop, call, flag, epoch, 0, call.comm.world_size);
}

}  // namespace kccl
