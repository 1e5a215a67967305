// reduce_scatter, simple protocol, pull: for CPUs, and messages longer than a few packets.
//
//     rank r:  in, all but chunk r --copy--> its own staging    (world_size - 1) * n bytes
//              flag "written" to every peer                     one word each
//              chunk r of each rank's staging --reduce--> out       (world_size - 1) * n bytes in
//
// n is the length of one chunk; a staging slot has a part for each chunk. Calls use two slots in
// turn. Two are enough (channel.cuh), because a peer that has entered the next call has read all
// that it needs of this one.
#pragma once

#include "../payload.cuh"
#include "../reduce.cuh"
#include "../same_call.cuh"

namespace kccl {

// Sets `out` to the reduction of the chunks that all ranks have for this rank, `count` elements of
// T each. The chunk for rank p is at in + p * stride. `count` may be any number. All else is as in
// reduce_scatter_direct_ll16().
template <class T, class Op, class Coop, int WORLD_SIZE>
KCCL_DEVICE Status reduce_scatter_pull_simple(Channel<Coop, WORLD_SIZE>& channel, T* out,
                                              const T* in, uint64_t count, uint64_t stride,
                                              const Op& op = Op{}) {
    const DeviceComm& comm = channel.comm();
    const Coop coop = channel.coop();
    // Parts begin on cache lines of their own, so that no two ranks read the same line.
    const uint64_t line = kKcclLineBytes / sizeof(T);
    const uint64_t round = comm.layout.staging_bytes / comm.world_size / kKcclLineBytes * line;
    for (; count > 0; out += round, in += round) {
        const uint64_t n = count < round ? count : round;
        count -= n;

        const Status entered = channel.next(kKcclReduceScatterPullSimple, Exchange::kPairwise);
        if (entered != kKcclOk) return entered;
        const auto part_of = [&](int rank, int owner) {
            return staging_slot<T>(comm, rank, channel.index(), channel.parity(), Half::kInput) +
                   owner * round;
        };
        for (int k = 0; k + 1 < channel.world_size(); ++k) {
            const int peer = channel.receiver(k);
            mem::overwrite(part_of(comm.rank, peer), in + peer * stride, n * sizeof(T),
                           coop.index(), coop.size());
        }
        say_written(channel);
        const Status written = await_written(channel, 0, comm.world_size);
        if (written != kKcclOk) return written;
        const T* rows[kKcclMaxWorldSize];
        for (int rank = 0; rank < comm.world_size; ++rank) rows[rank] = part_of(rank, comm.rank);
        rows[comm.rank] = in + comm.rank * stride;
        reduce_rows<T, Op>(coop, out, rows, comm.world_size, n, op);
        channel.leave();
    }
    return channel.status();
}

namespace kernels {

template <class T, class Op>
KCCL_KERNEL void reduce_scatter_pull_simple(KCCL_KERNEL_PARAM(KcclCall) parameter) {
    const KcclCall& call = platform::first_parameter(parameter);
    Channel<Block> channel(call, call.comm.world_size * sizeof(T));
    kccl::reduce_scatter_pull_simple<T, Op>(channel, output_of<T>(call), input_of<T>(call),
                                            call.count, call.count, operator_of<Op>(call));
}

}  // namespace kernels
}  // namespace kccl
