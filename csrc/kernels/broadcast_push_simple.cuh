// broadcast, simple protocol, push: for GPUs and messages bound by the links.
//
//     all:     "reduced" to every peer, and from all    each has read what earlier calls laid there
//     root:    in --copy--> the staging of every peer; "staged"    (world_size - 1) * n bytes out
//     others:  their own staging --copy--> out
//
// The order of the staging's uses and the half that they take are as in all_gather_push_simple.
// "Reduced" also makes the call pairwise: the next one waits for no credits.
#pragma once

#include "../include/kccl/channel.cuh"

namespace kccl {

// Called by all threads of the channel's coop. `count` is at most what a staging slot takes;
// otherwise as broadcast_direct_ll16.
template <class Coop, int WORLD_SIZE>
KCCL_DEVICE Status broadcast_push_simple(Channel<Coop, WORLD_SIZE>& channel, uint8_t* out,
                                         const uint8_t* in, uint32_t count, int root) {
    const DeviceComm& comm = channel.comm();
    const uint32_t thread = channel.thread();
    const uint32_t size = channel.num_threads();

    const Status entered = channel.next(kKcclBroadcastPushSimple, Exchange::kPairwise);
    if (entered != kKcclOk) return entered;
    channel.template arrive<mem::Order::kRelease>(kKcclFlagReduced);
    const Status vacated = channel.template await<mem::Order::kAcquire>(kKcclFlagReduced);
    if (vacated != kKcclOk) return vacated;

    const auto staging_of = [&](int rank) {
        return staging_slot<uint8_t>(comm, rank, channel.index(), channel.parity(), Half::kResult);
    };
    if (comm.rank == root) {
        // Over the peers at run time: unrolled, copies only take registers.
        for (int k = 0; k + 1 < comm.world_size; ++k) {
            mem::copy(staging_of(channel.receiver(k)), in, count, thread, size);
        }
        channel.template arrive<mem::Order::kRelease>(kKcclFlagStaged);
    } else {
        const Status staged =
            channel.template await<mem::Order::kAcquire>(kKcclFlagStaged, root, root + 1);
        if (staged != kKcclOk) return staged;
        mem::copy(out, staging_of(comm.rank), count, thread, size);
    }
    return channel.leave();
}

namespace kernels {

template <int WORLD_SIZE>
KCCL_KERNEL void broadcast_push_simple(KCCL_KERNEL_PARAM(KcclCall) call) {
    Channel<Block, WORLD_SIZE> channel(call);
    const Slice slice = call_slice<uint8_t>(call);
    in_rounds<uint8_t>(call, slice, call.comm.layout.staging_bytes,
                       [&](uint8_t* out, const uint8_t* in, uint32_t count) {
                           return kccl::broadcast_push_simple(channel, out, in, count, call.peer);
                       });
}

}  // namespace kernels
}  // namespace kccl
