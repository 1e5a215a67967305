// all_reduce, one_shot, simple protocol, pull: for CPUs, between packets and two_shot.
//
//     rank r:  in --copy--> its own staging        n bytes
//              "staged" to every peer              one word each
//              staging of every rank --reduce--> out        (world_size - 1) * n bytes in
//
// A CPU fetches a peer's lines as fast as the peer could push them, and needs no flag in each. The
// staging slots alternate by parity; why two suffice is told in channel.cuh: a peer that has
// entered the next call has finished pulling from this one.
#pragma once

#include "../include/kccl/channel.cuh"
#include "../include/kccl/reduce.cuh"

namespace kccl {

// Contract as all_reduce_one_shot_ll16.
template <class T, class Op, class Coop>
KCCL_DEVICE Status all_reduce_one_shot_pull_simple(Coop coop, const Call& call) {
    const DeviceComm& comm = call.comm;
    const uint64_t round = comm.layout.staging_bytes / sizeof(T);
    Channel channel(call);
    for (uint64_t begin = 0; begin < call.count; begin += round) {
        const T* in = reinterpret_cast<const T*>(call.input) + begin;
        T* out = reinterpret_cast<T*>(call.output) + begin;
        const uint64_t count = call.count - begin < round ? call.count - begin : round;

        const Status entered = channel.next(coop, Exchange::kPairwise);
        if (entered != kKcclOk) return entered;
        const T* rows[kKcclMaxWorldSize];
        for (int peer = 0; peer < comm.world_size; ++peer) {
            rows[peer] = staging_slot<T>(comm, peer, call.channel, channel.parity(), Half::kInput);
        }

        mem::stage(const_cast<T*>(rows[comm.rank]), in, count * sizeof(T), coop.index(),
                   coop.size());
        arrive<mem::Order::kRelease>(coop, call, kKcclFlagStaged, channel.epoch());
        const Status staged =
            await<mem::Order::kAcquire>(coop, call, kKcclFlagStaged, channel.epoch());
        if (staged != kKcclOk) return staged;
        rows[comm.rank] = in;
        reduce_rows<T, Op>(coop, out, rows, comm.world_size, count);
    }
    return kKcclOk;
}

namespace kernels {

template <class T, class Op>
KCCL_KERNEL void all_reduce_one_shot_pull_simple(KCCL_KERNEL_PARAM(KcclCall) call) {
    kccl::all_reduce_one_shot_pull_simple<T, Op>(block(), call);
}

}  // namespace kernels
}  // namespace kccl
