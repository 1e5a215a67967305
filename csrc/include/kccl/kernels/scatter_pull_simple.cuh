// scatter, simple protocol, pull: for CPUs, and messages longer than a few packets.
//
//     root:    in, all but its own chunk --copy--> its own staging; flag "written" to every peer
//     others:  part r of the root's staging --copy--> out
//
// A staging slot has a part for each chunk. The root does not wait for its peers in this call. So
// the call is credited (channel.cuh): the root writes a staging slot again only after every peer
// has entered the call after the one that used it.
#pragma once

#include "../payload.cuh"
#include "../same_call.cuh"

namespace kccl {

// Copies the root's chunk at in + p * stride, `count` bytes, to the `out` of each rank p. `count`
// may be any number. All else is as in scatter_direct_ll16().
template <class Coop, int WORLD_SIZE>
KCCL_DEVICE Status scatter_pull_simple(Channel<Coop, WORLD_SIZE>& channel, uint8_t* out,
                                       const uint8_t* in, uint64_t count, uint64_t stride,
                                       int root) {
    const DeviceComm& comm = channel.comm();
    const Coop coop = channel.coop();
    // Parts begin on cache lines of their own, so that no two ranks read the same line.
    const uint64_t round =
        comm.layout.staging_bytes / comm.world_size / kKcclLineBytes * kKcclLineBytes;
    for (; count > 0; out += round, in += round) {
        const uint64_t n = count < round ? count : round;
        count -= n;

        const Status entered = channel.next(kKcclScatterPullSimple, Exchange::kCredited);
        if (entered != kKcclOk) return entered;
        const auto part_of = [&](int owner) {
            return staging_slot<uint8_t>(comm, root, channel.index(), channel.parity(),
                                         Half::kInput) +
                   owner * round;
        };
        if (comm.rank == root) {
            for (int k = 0; k + 1 < channel.world_size(); ++k) {
                const int peer = channel.receiver(k);
                mem::overwrite(part_of(peer), in + peer * stride, n, coop.index(), coop.size());
            }
            say_written(channel);
            const uint8_t* own = in + root * stride;
            if (out != own) mem::copy(out, own, n, coop.index(), coop.size());
        } else {
            const Status written = await_written(channel, root, root + 1);
            if (written != kKcclOk) return written;
            mem::copy(out, part_of(comm.rank), n, coop.index(), coop.size());
        }
        channel.leave();
    }
    return channel.status();
}

namespace kernels {

KCCL_KERNEL void scatter_pull_simple(KCCL_KERNEL_PARAM(KcclCall) parameter) {
    const KcclCall& call = platform::first_parameter(parameter);
    Channel<Block> channel(call, call.comm.world_size);
    kccl::scatter_pull_simple(channel, output_of<uint8_t>(call), input_of<uint8_t>(call),
                              call.count, call.count, call.peer);
}

}  // namespace kernels
}  // namespace kccl
