// gather, simple protocol, pull: for CPUs, and messages longer than a few packets.
//
//     others:  in --copy--> their own staging; flag "written" to every peer
//     root:    staging of peer p --copy--> chunk p of out    (world_size - 1) * n bytes in
//
// n is the length of `in` in bytes. Only the root waits. So the call is credited (channel.cuh): a
// rank writes its staging slot again only after the root has entered the call after the one that
// used it.
#pragma once

#include "../payload.cuh"
#include "../same_call.cuh"

namespace kccl {

// Copies the `in` of each rank p, `count` bytes, to out + p * stride on the root. `count` may be
// any number. All else is as in gather_direct_ll16().
template <class Coop, int WORLD_SIZE>
KCCL_DEVICE Status gather_pull_simple(Channel<Coop, WORLD_SIZE>& channel, uint8_t* out,
                                      const uint8_t* in, uint64_t count, uint64_t stride,
                                      int root) {
    const DeviceComm& comm = channel.comm();
    const Coop coop = channel.coop();
    const uint64_t round = comm.layout.staging_bytes;
    for (; count > 0; out += round, in += round) {
        const uint64_t n = count < round ? count : round;
        count -= n;

        const Status entered = channel.next(kKcclGatherPullSimple, Exchange::kCredited);
        if (entered != kKcclOk) return entered;
        const auto staging_of = [&](int rank) {
            return staging_slot<uint8_t>(comm, rank, channel.index(), channel.parity(),
                                         Half::kInput);
        };
        if (comm.rank != root) {
            mem::overwrite(staging_of(comm.rank), in, n, coop.index(), coop.size());
            say_written(channel);
        } else {
            say_written(channel);
            // Copies the root's own chunk now, while the peers' flags are on their way: it needs no
            // peer.
            uint8_t* mine = out + root * stride;
            if (mine != in) mem::copy(mine, in, n, coop.index(), coop.size());
            const Status written = await_written(channel, 0, comm.world_size);
            if (written != kKcclOk) return written;
            for (int k = 0; k + 1 < channel.world_size(); ++k) {
                const int peer = channel.receiver(k);
                mem::copy(out + peer * stride, staging_of(peer), n, coop.index(), coop.size());
            }
        }
        channel.leave();
    }
    return channel.status();
}

namespace kernels {

KCCL_KERNEL void gather_pull_simple(KCCL_KERNEL_PARAM(KcclCall) parameter) {
    const KcclCall& call = platform::first_parameter(parameter);
    Channel<Block> channel(call, call.comm.world_size);
    kccl::gather_pull_simple(channel, output_of<uint8_t>(call), input_of<uint8_t>(call), call.count,
                             call.count, call.peer);
}

}  // namespace kernels
}  // namespace kccl
