// all_reduce, one_shot, simple protocol, pull: for CPUs, and messages too long for ll16 but too
// short for two_shot.
//
//     rank r:  in --copy--> its own staging        n bytes
//              flag "written" to every peer         one word each
//              staging of every rank --reduce--> out        (world_size - 1) * n bytes in
//
// n is the length of `in` in bytes. A CPU pulls a peer's cache lines as fast as the peer could push
// them, and pulled lines need no flags. Calls use two staging slots in turn. Two are enough
// (channel.cuh), because a peer that has entered the next call has read all that it needs of this
// one.
#pragma once

#include "../payload.cuh"
#include "../reduce.cuh"
#include "../same_call.cuh"

namespace kccl {

// Sets every rank's `out` to the reduction of all ranks' `in`, `count` elements of T. `count` may
// be any number. All else is as in all_reduce_one_shot_ll16().
template <class T, class Op, class Coop, int WORLD_SIZE>
KCCL_DEVICE Status all_reduce_one_shot_pull_simple(Channel<Coop, WORLD_SIZE>& channel, T* out,
                                                   const T* in, uint64_t count,
                                                   const Op& op = Op{}) {
    const DeviceComm& comm = channel.comm();
    const Coop coop = channel.coop();
    const uint64_t round = comm.layout.staging_bytes / sizeof(T);
    for (; count > 0; out += round, in += round) {
        const uint64_t n = count < round ? count : round;
        count -= n;

        const Status entered = channel.next(kKcclAllReduceOneShotPullSimple, Exchange::kPairwise);
        if (entered != kKcclOk) return entered;
        const T* rows[kKcclMaxWorldSize];
        for (int peer = 0; peer < comm.world_size; ++peer) {
            rows[peer] =
                staging_slot<T>(comm, peer, channel.index(), channel.parity(), Half::kInput);
        }

        mem::overwrite(const_cast<T*>(rows[comm.rank]), in, n * sizeof(T), coop.index(),
                       coop.size());
        say_written(channel);
        const Status written = await_written(channel, 0, comm.world_size);
        if (written != kKcclOk) return written;
        // A rank reads its own array faster than the copy in its staging, whose cache lines its
        // peers read. But if ranks share arrays, a peer may already have stored its result in this
        // one.
        if (comm.shares_arrays == 0) rows[comm.rank] = in;
        reduce_rows<T, Op>(coop, out, rows, comm.world_size, n, op);
        channel.leave();
    }
    return channel.status();
}

namespace kernels {

template <class T, class Op>
KCCL_KERNEL void all_reduce_one_shot_pull_simple(KCCL_KERNEL_PARAM(KcclCall) parameter) {
    const KcclCall& call = platform::first_parameter(parameter);
    Channel<Block> channel(call, sizeof(T));
    kccl::all_reduce_one_shot_pull_simple<T, Op>(channel, output_of<T>(call), input_of<T>(call),
                                                 call.count, operator_of<Op>(call));
}

}  // namespace kernels
}  // namespace kccl
