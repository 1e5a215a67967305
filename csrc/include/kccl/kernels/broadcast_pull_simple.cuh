// broadcast, simple protocol, pull: for CPUs, and messages longer than a few packets.
//
//     root:    in --copy--> its own staging; flag "written" to every peer
//     others:  the root's staging --copy--> out
//
// The root does not wait for its peers in this call. So the call is credited (channel.cuh): the
// root writes a staging slot again only after every peer has entered the call after the one that
// used it.
#pragma once

#include "../payload.cuh"
#include "../same_call.cuh"

namespace kccl {

// Copies the root's `in`, `count` bytes, to the `out` of all other ranks. `count` may be any
// number. All else is as in broadcast_direct_ll16().
template <class Coop, int WORLD_SIZE>
KCCL_DEVICE Status broadcast_pull_simple(Channel<Coop, WORLD_SIZE>& channel, uint8_t* out,
                                         const uint8_t* in, uint64_t count, int root) {
    const DeviceComm& comm = channel.comm();
    const Coop coop = channel.coop();
    const uint64_t round = comm.layout.staging_bytes;
    for (; count > 0; out += round, in += round) {
        const uint64_t n = count < round ? count : round;
        count -= n;

        const Status entered = channel.next(kKcclBroadcastPullSimple, Exchange::kCredited);
        if (entered != kKcclOk) return entered;
        auto* staging =
            staging_slot<uint8_t>(comm, root, channel.index(), channel.parity(), Half::kInput);
        if (comm.rank == root) {
            mem::overwrite(staging, in, n, coop.index(), coop.size());
            say_written(channel);
        } else {
            const Status written = await_written(channel, root, root + 1);
            if (written != kKcclOk) return written;
            mem::copy(out, staging, n, coop.index(), coop.size());
        }
        channel.leave();
    }
    return channel.status();
}

namespace kernels {

KCCL_KERNEL void broadcast_pull_simple(KCCL_KERNEL_PARAM(KcclCall) parameter) {
    const KcclCall& call = platform::first_parameter(parameter);
    Channel<Block> channel(call, 1);
    kccl::broadcast_pull_simple(channel, output_of<uint8_t>(call), input_of<uint8_t>(call),
                                call.count, call.peer);
}

}  // namespace kernels
}  // namespace kccl
