// all_gather, simple protocol, pull: for CPUs, and messages longer than a few packets.
//
//     rank r:  in --copy--> its own staging        n bytes
//              flag "written" to every peer         one word each
//              staging of peer p --copy--> chunk p of out    (world_size - 1) * n bytes in
//
// n is the length of `in` in bytes. Calls use two staging slots in turn. Two are enough
// (channel.cuh), because a peer that has entered the next call has read all that it needs of this
// one.
#pragma once

#include "../payload.cuh"
#include "../same_call.cuh"

namespace kccl {

// Copies the `in` of each rank p, `count` bytes, to out + p * stride on every rank. `count` may be
// any number. All else is as in all_gather_direct_ll16().
template <class Coop, int WORLD_SIZE>
KCCL_DEVICE Status all_gather_pull_simple(Channel<Coop, WORLD_SIZE>& channel, uint8_t* out,
                                          const uint8_t* in, uint64_t count, uint64_t stride) {
    const DeviceComm& comm = channel.comm();
    const Coop coop = channel.coop();
    const uint64_t round = comm.layout.staging_bytes;
    for (; count > 0; out += round, in += round) {
        const uint64_t n = count < round ? count : round;
        count -= n;

        const Status entered = channel.next(kKcclAllGatherPullSimple, Exchange::kPairwise);
        if (entered != kKcclOk) return entered;
        const auto staging_of = [&](int rank) {
            return staging_slot<uint8_t>(comm, rank, channel.index(), channel.parity(),
                                         Half::kInput);
        };
        mem::overwrite(staging_of(comm.rank), in, n, coop.index(), coop.size());
        say_written(channel);
        // Copies this rank's own chunk now, while the peers' flags are on their way: it needs no
        // peer.
        uint8_t* mine = out + comm.rank * stride;
        if (mine != in) mem::copy(mine, in, n, coop.index(), coop.size());
        const Status written = await_written(channel, 0, comm.world_size);
        if (written != kKcclOk) return written;
        for (int k = 0; k + 1 < channel.world_size(); ++k) {
            const int peer = channel.receiver(k);
            mem::copy(out + peer * stride, staging_of(peer), n, coop.index(), coop.size());
        }
        channel.leave();
    }
    return channel.status();
}

namespace kernels {

KCCL_KERNEL void all_gather_pull_simple(KCCL_KERNEL_PARAM(KcclCall) parameter) {
    const KcclCall& call = platform::first_parameter(parameter);
    Channel<Block> channel(call, 1);
    kccl::all_gather_pull_simple(channel, output_of<uint8_t>(call), input_of<uint8_t>(call),
                                 call.count, call.count);
}

}  // namespace kernels
}  // namespace kccl
