// reduce, simple protocol, pull: for CPUs, and messages longer than a few packets.
//
//     rank r:  in --copy--> its own staging; flag "written" to every peer
//     root:    its own in, and the others' staging --reduce--> out    (world_size - 1) * n bytes in
//
// n is the length of `in` in bytes. Only the root waits. So the call is credited (channel.cuh): a
// rank writes a staging slot again only after the root has entered the call after the one that used
// it. The other ranks run a round ahead, and copy the next round while the root reduces this one.
#pragma once

#include "../payload.cuh"
#include "../reduce.cuh"
#include "../same_call.cuh"

namespace kccl {

// Sets the root's `out` to the reduction of all ranks' `in`, `count` elements of T. `count` may be
// any number. All else is as in reduce_direct_ll16().
template <class T, class Op, class Coop, int WORLD_SIZE>
KCCL_DEVICE Status reduce_pull_simple(Channel<Coop, WORLD_SIZE>& channel, T* out, const T* in,
                                      uint64_t count, int root, const Op& op = Op{}) {
    const DeviceComm& comm = channel.comm();
    const Coop coop = channel.coop();
    const uint64_t round = comm.layout.staging_bytes / sizeof(T);
    for (; count > 0; out += round, in += round) {
        const uint64_t n = count < round ? count : round;
        count -= n;

        const Status entered = channel.next(kKcclReducePullSimple, Exchange::kCredited);
        if (entered != kKcclOk) return entered;
        const auto staging_of = [&](int rank) {
            return staging_slot<T>(comm, rank, channel.index(), channel.parity(), Half::kInput);
        };
        if (comm.rank != root) {
            mem::overwrite(staging_of(comm.rank), in, n * sizeof(T), coop.index(), coop.size());
            say_written(channel);
        } else {
            say_written(channel);
            const Status written = await_written(channel, 0, comm.world_size);
            if (written != kKcclOk) return written;
            const T* rows[kKcclMaxWorldSize];
            for (int rank = 0; rank < comm.world_size; ++rank) rows[rank] = staging_of(rank);
            rows[root] = in;
            reduce_rows<T, Op>(coop, out, rows, comm.world_size, n, op);
        }
        channel.leave();
    }
    return channel.status();
}

namespace kernels {

template <class T, class Op>
KCCL_KERNEL void reduce_pull_simple(KCCL_KERNEL_PARAM(KcclCall) parameter) {
    const KcclCall& call = platform::first_parameter(parameter);
    Channel<Block> channel(call, sizeof(T));
    kccl::reduce_pull_simple<T, Op>(channel, output_of<T>(call), input_of<T>(call), call.count,
                                    call.peer, operator_of<Op>(call));
}

}  // namespace kernels
}  // namespace kccl
