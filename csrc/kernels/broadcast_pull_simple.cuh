// broadcast, simple protocol, pull: for CPUs and messages longer than a few packets.
//
//     root:    in --copy--> its own staging; "staged" to every peer
//     others:  the root's staging --copy--> out
//
// The root waits for nobody: the call is credited, so the root refills a staging slot only after
// every peer has entered the call after the one that used it (channel.cuh).
#pragma once

#include "../include/kccl/channel.cuh"

namespace kccl {

// Contract as broadcast_direct_ll16.
template <class Coop>
KCCL_DEVICE Status broadcast_pull_simple(Coop coop, const Call& call) {
    const DeviceComm& comm = call.comm;
    const int root = call.peer;
    const uint64_t round = comm.layout.staging_bytes;
    Channel channel(call);
    for (uint64_t begin = 0; begin < call.count; begin += round) {
        const auto* in = reinterpret_cast<const uint8_t*>(call.input) + begin;
        auto* out = reinterpret_cast<uint8_t*>(call.output) + begin;
        const uint64_t count = call.count - begin < round ? call.count - begin : round;

        const Status entered = channel.next(coop, Exchange::kCredited);
        if (entered != kKcclOk) return entered;
        auto* staging =
            staging_slot<uint8_t>(comm, root, call.channel, channel.parity(), Half::kInput);
        if (comm.rank == root) {
            mem::stage(staging, in, count, coop.index(), coop.size());
            arrive<mem::Order::kRelease>(coop, call, kKcclFlagStaged, channel.epoch());
            continue;
        }
        const Status staged = await<mem::Order::kAcquire>(coop, call, kKcclFlagStaged,
                                                          channel.epoch(), root, root + 1);
        if (staged != kKcclOk) return staged;
        mem::copy(out, staging, count, coop.index(), coop.size());
    }
    return kKcclOk;
}

namespace kernels {

KCCL_KERNEL void broadcast_pull_simple(KCCL_KERNEL_PARAM(KcclCall) call) {
    kccl::broadcast_pull_simple(block(), call);
}

}  // namespace kernels
}  // namespace kccl
