// all_reduce, two_shot, simple protocol, pull: for CPUs, and messages whose time depends on memory
// bandwidth. Rank r owns chunk r of the message.
//
//     reduce-scatter   in, all but chunk r --copy--> its own staging, input half; flag "written"
//                      chunk r of all input halves --reduce--> its own result half; flag "reduced"
//     all-gather       chunk p of each peer p's result half --copy--> out
//
//     traffic in per rank: 2 * (world_size - 1) / world_size * n bytes
//
// n is the length of `in` in bytes. Rounds are so short that the staging stays in the caches. So
// main memory sees little more than one read of `in` and one write of `out`. Calls use two staging
// slots in turn; channel.cuh says why two are enough.
#pragma once

#include "../payload.cuh"
#include "../reduce.cuh"
#include "../same_call.cuh"

namespace kccl {

// Sets every rank's `out` to the reduction of all ranks' `in`, `count` elements of T. `count` may
// be any number. All else is as in all_reduce_one_shot_ll16().
template <class T, class Op, class Coop, int WORLD_SIZE>
KCCL_DEVICE Status all_reduce_two_shot_pull_simple(Channel<Coop, WORLD_SIZE>& channel, T* out,
                                                   const T* in, uint64_t count,
                                                   const Op& op = Op{}) {
    const DeviceComm& comm = channel.comm();
    const Coop coop = channel.coop();
    const int world_size = comm.world_size;
    const uint64_t round = comm.layout.staging_bytes / sizeof(T);
    // Chunks begin on lines of their own, so that no line of the staging has two owners.
    const uint64_t line = kKcclLineBytes / sizeof(T);
    for (; count > 0; out += round, in += round) {
        const uint64_t n = count < round ? count : round;
        count -= n;
        const uint64_t chunk = (n + world_size * line - 1) / (world_size * line) * line;
        uint64_t first[kKcclMaxWorldSize + 1];
        for (int rank = 0; rank <= world_size; ++rank) {
            first[rank] = rank * chunk < n ? rank * chunk : n;
        }
        const uint64_t mine = first[comm.rank];
        const uint64_t mine_end = first[comm.rank + 1];

        const Status entered = channel.next(kKcclAllReduceTwoShotPullSimple, Exchange::kPairwise);
        if (entered != kKcclOk) return entered;
        const T* inputs[kKcclMaxWorldSize];
        const T* results[kKcclMaxWorldSize];
        for (int peer = 0; peer < world_size; ++peer) {
            inputs[peer] =
                staging_slot<T>(comm, peer, channel.index(), channel.parity(), Half::kInput);
            results[peer] =
                staging_slot<T>(comm, peer, channel.index(), channel.parity(), Half::kResult);
        }

        T* staging = const_cast<T*>(inputs[comm.rank]);
        mem::overwrite(staging, in, mine * sizeof(T), coop.index(), coop.size());
        mem::overwrite(staging + mine_end, in + mine_end, (n - mine_end) * sizeof(T), coop.index(),
                       coop.size());
        say_written(channel);
        const Status written = await_written(channel, 0, comm.world_size);
        if (written != kKcclOk) return written;

        const T* rows[kKcclMaxWorldSize];
        for (int peer = 0; peer < world_size; ++peer) {
            rows[peer] = (peer == comm.rank ? in : inputs[peer]) + mine;
        }
        T* result = const_cast<T*>(results[comm.rank]);
        reduce_rows<T, Op>(coop, result + mine, rows, world_size, mine_end - mine, op);
        channel.template arrive<mem::Order::kRelease>(kKcclFlagReduced);
        // Copies this rank's own chunk now, while the peers' flags are on their way: it needs no
        // peer.
        mem::copy(out + mine, result + mine, (mine_end - mine) * sizeof(T), coop.index(),
                  coop.size());
        const Status reduced = channel.template await<mem::Order::kAcquire>(kKcclFlagReduced);
        if (reduced != kKcclOk) return reduced;

        for (int k = 1; k < world_size; ++k) {
            const int peer = (comm.rank + k) % world_size;
            mem::copy(out + first[peer], results[peer] + first[peer],
                      (first[peer + 1] - first[peer]) * sizeof(T), coop.index(), coop.size());
        }
        channel.leave();
    }
    return channel.status();
}

namespace kernels {

template <class T, class Op>
KCCL_KERNEL void all_reduce_two_shot_pull_simple(KCCL_KERNEL_PARAM(KcclCall) parameter) {
    const KcclCall& call = platform::first_parameter(parameter);
    Channel<Block> channel(call, sizeof(T));
    kccl::all_reduce_two_shot_pull_simple<T, Op>(channel, output_of<T>(call), input_of<T>(call),
                                                 call.count, operator_of<Op>(call));
}

}  // namespace kernels
}  // namespace kccl
