// wait: waits for call.count signals under an id (call.channel) from call.peer, or from any ranks
// together when that is -1, and consumes them. What the signalling ranks wrote before is visible
// after.
//
// The words only ever count up; what this rank has consumed of each is kept in its own memory.
#pragma once

#include "../include/kccl/signal.cuh"

namespace kccl {

// Called by all threads of the coop; the leading thread polls. One coop at a time waits under an id:
// what was consumed is plain memory, which the coop's syncs order.
template <class Coop>
KCCL_DEVICE Status wait(Coop coop, const Call& call) {
    const DeviceComm& comm = call.comm;
    const int first = call.peer < 0 ? 0 : call.peer;
    const int last = call.peer < 0 ? comm.world_size : call.peer + 1;
    uint32_t (&consumed)[kKcclMaxWorldSize][kKcclNumSignals] = state_of(comm)->consumed;
    const uint32_t wanted = static_cast<uint32_t>(call.count);
    const Status status = status_of(comm);
    if (coop.any(status != kKcclOk)) return status_of(comm);

    uint32_t pending[kKcclMaxWorldSize];
    uint32_t total;
    // The ranks whose end would make the wait hopeless: this one waits, so it cannot signal itself.
    const uint32_t sources = (1u << last) - (1u << first);
    const uint32_t others = sources & ~(1u << comm.rank);
    const uint32_t hopes = others != 0 ? others : sources;
    uint32_t missing;
    Wait wait(call, wanted, call.peer < 0 ? Need::kAny : Need::kEach);
    do {
        total = 0;
        for (int source = first; source < last; ++source) {
            const uint32_t sent = mem::load<mem::Order::kAcquire, mem::Scope::kSystem>(
                signal_word(comm, comm.rank, call.channel, source));
            pending[source] = sent - consumed[source][call.channel];
            total += pending[source];
        }
        missing = leads(coop) && total < wanted ? hopes : 0;
    } while (wait.again(missing, total));
    if (coop.any(wait.failed())) return status_of(comm);
    if (leads(coop)) {
        uint32_t rest = wanted;
        for (int source = first; source < last; ++source) {
            const uint32_t taken = pending[source] < rest ? pending[source] : rest;
            consumed[source][call.channel] += taken;
            rest -= taken;
        }
    }
    coop.sync();
    return kKcclOk;
}

namespace kernels {

KCCL_KERNEL void wait(KCCL_KERNEL_PARAM(KcclCall) call) { kccl::wait(block(), call); }

}  // namespace kernels
}  // namespace kccl
