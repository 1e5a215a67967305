// all_to_all, simple protocol, pull: for CPUs, and messages longer than a few packets.
//
//     rank r:  in, all but chunk r --copy--> its own staging    (world_size - 1) * n bytes
//              flag "written" to every peer                     one word each
//              part r of peer p's staging --copy--> chunk p of out  (world_size - 1) * n bytes in
//
// n is the length of one chunk; a staging slot has a part for each chunk. `out` may be `in`: a
// round writes only what it has copied to the staging before. Calls use two slots in turn. Two are
// enough (channel.cuh), because a peer that has entered the next call has read all that it needs of
// this one.
#pragma once

#include "../payload.cuh"
#include "../same_call.cuh"

namespace kccl {

// Sends the chunk at in + p * stride, `count` bytes, to each rank p, and stores the chunk from rank
// p at out + p * stride. `count` may be any number. All else is as in all_to_all_direct_ll16().
template <class Coop, int WORLD_SIZE>
KCCL_DEVICE Status all_to_all_pull_simple(Channel<Coop, WORLD_SIZE>& channel, uint8_t* out,
                                          const uint8_t* in, uint64_t count, uint64_t stride) {
    const DeviceComm& comm = channel.comm();
    const Coop coop = channel.coop();
    // Parts begin on cache lines of their own, so that no two ranks read the same line.
    const uint64_t round =
        comm.layout.staging_bytes / comm.world_size / kKcclLineBytes * kKcclLineBytes;
    for (; count > 0; out += round, in += round) {
        const uint64_t n = count < round ? count : round;
        count -= n;

        const Status entered = channel.next(kKcclAllToAllPullSimple, Exchange::kPairwise);
        if (entered != kKcclOk) return entered;
        const auto part_of = [&](int rank, int owner) {
            return staging_slot<uint8_t>(comm, rank, channel.index(), channel.parity(),
                                         Half::kInput) +
                   owner * round;
        };
        for (int k = 0; k + 1 < channel.world_size(); ++k) {
            const int peer = channel.receiver(k);
            mem::overwrite(part_of(comm.rank, peer), in + peer * stride, n, coop.index(),
                           coop.size());
        }
        say_written(channel);
        // Copies this rank's own chunk now, while the peers' flags are on their way: it needs no
        // peer.
        uint8_t* mine = out + comm.rank * stride;
        const uint8_t* own = in + comm.rank * stride;
        if (mine != own) mem::copy(mine, own, n, coop.index(), coop.size());
        const Status written = await_written(channel, 0, comm.world_size);
        if (written != kKcclOk) return written;
        for (int k = 0; k + 1 < channel.world_size(); ++k) {
            const int peer = channel.receiver(k);
            mem::copy(out + peer * stride, part_of(peer, comm.rank), n, coop.index(), coop.size());
        }
        channel.leave();
    }
    return channel.status();
}

namespace kernels {

KCCL_KERNEL void all_to_all_pull_simple(KCCL_KERNEL_PARAM(KcclCall) parameter) {
    const KcclCall& call = platform::first_parameter(parameter);
    Channel<Block> channel(call, call.comm.world_size);
    kccl::all_to_all_pull_simple(channel, output_of<uint8_t>(call), input_of<uint8_t>(call),
                                 call.count, call.count);
}

}  // namespace kernels
}  // namespace kccl
