// scan, simple protocol, pull: for CPUs, and messages longer than a few packets.
//
//     rank r:  in --copy--> its own staging; flag "written" to every peer
//              its own in, and the staging of ranks 0 to r - 1 --reduce--> out    r * n bytes in
//
// n is the length of `in` in bytes. Each rank waits for all others, so the call is pairwise. Calls
// use two staging slots in turn. Two are enough (channel.cuh), because a peer that has entered the
// next call has read all that it needs of this one.
#pragma once

#include "../payload.cuh"
#include "../reduce.cuh"
#include "../same_call.cuh"

namespace kccl {

// Sets `out` to the reduction of the `in` of ranks 0 to this one, `count` elements of T. If
// `exclusive` is 1 instead of 0, this rank's own `in` is left out. `count` may be any number. All
// else is as in scan_direct_ll16().
template <class T, class Op, class Coop, int WORLD_SIZE>
KCCL_DEVICE Status scan_pull_simple(Channel<Coop, WORLD_SIZE>& channel, T* out, const T* in,
                                    uint64_t count, int exclusive, const Op& op = Op{}) {
    const DeviceComm& comm = channel.comm();
    const Coop coop = channel.coop();
    const int num_terms = comm.rank + 1 - exclusive;
    const uint64_t round = comm.layout.staging_bytes / sizeof(T);
    for (; count > 0; out += round, in += round) {
        const uint64_t n = count < round ? count : round;
        count -= n;

        const Status entered = channel.next(kKcclScanPullSimple, Exchange::kPairwise);
        if (entered != kKcclOk) return entered;
        const auto staging_of = [&](int rank) {
            return staging_slot<T>(comm, rank, channel.index(), channel.parity(), Half::kInput);
        };
        // The last rank copies nothing, because no higher rank needs its array.
        if (comm.rank + 1 < comm.world_size) {
            mem::overwrite(staging_of(comm.rank), in, n * sizeof(T), coop.index(), coop.size());
        }
        say_written(channel);
        const Status written = await_written(channel, 0, comm.world_size);
        if (written != kKcclOk) return written;
        if (num_terms > 0) {
            const T* rows[kKcclMaxWorldSize];
            for (int rank = 0; rank < num_terms; ++rank) {
                rows[rank] = rank == comm.rank ? in : staging_of(rank);
            }
            reduce_rows<T, Op>(coop, out, rows, num_terms, n, op);
        }
        channel.leave();
    }
    return channel.status();
}

namespace kernels {

template <class T, class Op>
KCCL_KERNEL void scan_pull_simple(KCCL_KERNEL_PARAM(KcclCall) parameter) {
    const KcclCall& call = platform::first_parameter(parameter);
    Channel<Block> channel(call, sizeof(T));
    kccl::scan_pull_simple<T, Op>(channel, output_of<T>(call), input_of<T>(call), call.count,
                                  call.peer, operator_of<Op>(call));
}

}  // namespace kernels
}  // namespace kccl
