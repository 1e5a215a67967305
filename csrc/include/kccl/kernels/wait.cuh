// wait: waits for signals under an id, from one peer or from all ranks together, and consumes them.
// What the signalling ranks wrote before their signals is visible after the wait.
//
// Each source counts the signals that it has sent in a word of this rank's window, which only
// counts up. How many of them this rank has consumed is stored in its KcclState.
#pragma once

#include "../one_sided.cuh"

namespace kccl {

// Waits for `wanted` signals from `peer`, and consumes them. `peer` -1: from all ranks together.
// `signal_id`: from 0 to kKcclNumSignals - 1, which is 63. `wanted`: less than 2^31. With other
// arguments the call returns a failed status and does not wait.
//
// Called by all threads of the coop (a thread, warp or block: coop.cuh); its first thread polls.
// One coop at a time waits under an id, because the counts of consumed signals are plain memory,
// which the coop's syncs order.
template <class Coop>
KCCL_DEVICE Status wait(Coop coop, const DeviceComm& comm, int peer, int signal_id,
                        uint32_t wanted) {
    begin_together<kCoopKind<Coop>>(comm, "wait",
                                    {{"peer", static_cast<uint64_t>(peer)},
                                     {"signal_id", static_cast<uint64_t>(signal_id)},
                                     {"wanted", wanted}});
    const int first = peer < 0 ? 0 : peer;
    const int last = peer < 0 ? comm.world_size : peer + 1;
    uint32_t (&consumed)[kKcclMaxWorldSize][kKcclNumSignals] = state_of(comm)->consumed;
    const Status status = status_of(comm);
    if (coop.any(status != kKcclOk)) return status_of(comm);
    const Status found = check_signal(coop, comm, kKcclWait, peer, signal_id, -1);
    if (found != kKcclOk) return found;
    constexpr uint32_t kMostWanted = 0x7fffffff;
    if (wanted > kMostWanted) {
        return refuse_by(coop, comm, kKcclWait, {kKcclArgumentWanted, wanted, kMostWanted});
    }

    uint32_t pending[kKcclMaxWorldSize];
    uint32_t total;
    // The wait fails when all ranks of `hopes` are gone. This rank is left out unless it is the
    // only source, because it cannot signal while it waits.
    const uint32_t sources = (1u << last) - (1u << first);
    const uint32_t others = sources & ~(1u << comm.rank);
    const uint32_t hopes = others != 0 ? others : sources;
    const auto poll = [&] {
        total = 0;
        for (int source = first; source < last; ++source) {
            const uint32_t sent = mem::load<mem::Order::kAcquire, mem::Scope::kSystem>(
                signal_word(comm, comm.rank, signal_id, source));
            pending[source] = sent - consumed[source][signal_id];
            total += pending[source];
        }
        return !leads(coop) || total >= wanted;
    };
    const auto missing = [&] { return Missing{leads(coop) && total < wanted ? hopes : 0, total}; };
    const Awaited awaited = {kKcclWait, signal_id, wanted, peer < 0 ? Need::kAny : Need::kEach};
    if (coop.any(!wait_until(comm, awaited, poll, missing))) return status_of(comm);
    if (leads(coop)) {
        uint32_t rest = wanted;
        for (int source = first; source < last; ++source) {
            const uint32_t taken = pending[source] < rest ? pending[source] : rest;
            consumed[source][signal_id] += taken;
            rest -= taken;
        }
    }
    coop.sync();
    return kKcclOk;
}

namespace kernels {

KCCL_KERNEL void wait(KCCL_KERNEL_PARAM(KcclCall) parameter) {
    const KcclCall& call = platform::first_parameter(parameter);
    mem::await_kernels_before();
    kccl::wait(block(), call.comm, call.peer, call.channel, static_cast<uint32_t>(call.count));
}

}  // namespace kernels
}  // namespace kccl
