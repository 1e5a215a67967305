// all_gather, simple protocol, push: for GPUs and messages bound by the links.
//
//     rank r:  "reduced" to every peer, and from all    each has read what earlier calls laid there
//              in --copy--> part r of every peer's staging    (world_size - 1) * n bytes out
//              "staged" to every peer                         one word each
//              part p of its own staging --copy--> chunk p of out
//
// Chunks longer than a part of the staging go in rounds, each a call of its own on the channel. The
// staging holds plain data. The call before may have ended by packets, which order nothing, so
// it takes flags to say that the peers' reads of earlier calls come before what is written here:
// "reduced" of a peer says that it has read all that was ever laid into its staging. The parts lie in
// the result half: nobody writes that before he has heard of all ranks in the same call, while
// two_shot_push writes the input half at once, and knows only of those who read it in a two_shot.
#pragma once

#include "../include/kccl/channel.cuh"

namespace kccl {

// Called by all threads of the channel's coop. `count` is at most staging_part_bytes(); otherwise as
// all_gather_direct_ll16.
template <class Coop, int WORLD_SIZE>
KCCL_DEVICE Status all_gather_push_simple(Channel<Coop, WORLD_SIZE>& channel, uint8_t* out,
                                          const uint8_t* in, uint32_t count, uint64_t stride) {
    const DeviceComm& comm = channel.comm();
    const uint32_t thread = channel.thread();
    const uint32_t size = channel.num_threads();
    const uint32_t part = (count + kKcclLineBytes - 1) / kKcclLineBytes * kKcclLineBytes;

    const Status entered = channel.next(kKcclAllGatherPushSimple, Exchange::kPairwise);
    if (entered != kKcclOk) return entered;
    channel.template arrive<mem::Order::kRelease>(kKcclFlagReduced);
    const Status vacated = channel.template await<mem::Order::kAcquire>(kKcclFlagReduced);
    if (vacated != kKcclOk) return vacated;

    const auto part_of = [&](int rank, int source) {
        return staging_slot<uint8_t>(comm, rank, channel.index(), channel.parity(), Half::kResult) +
               source * part;
    };
    // Over the peers at run time: unrolled, copies only take registers.
    for (int k = 0; k + 1 < comm.world_size; ++k) {
        mem::copy(part_of(channel.receiver(k), comm.rank), in, count, thread, size);
    }
    channel.template arrive<mem::Order::kRelease>(kKcclFlagStaged);
    // Between arriving and awaiting, because it needs no peer.
    uint8_t* mine = out + comm.rank * stride;
    if (mine != in) mem::copy(mine, in, count, thread, size);
    const Status staged = channel.template await<mem::Order::kAcquire>(kKcclFlagStaged);
    if (staged != kKcclOk) return staged;

    for (int k = 0; k + 1 < comm.world_size; ++k) {
        const int peer = channel.receiver(k);
        mem::copy(out + peer * stride, part_of(comm.rank, peer), count, thread, size);
    }
    return channel.leave();
}

namespace kernels {

template <int WORLD_SIZE>
KCCL_KERNEL void all_gather_push_simple(KCCL_KERNEL_PARAM(KcclCall) call) {
    Channel<Block, WORLD_SIZE> channel(call);
    const Slice slice = call_slice<uint8_t>(call);
    in_rounds<uint8_t>(call, slice, staging_part_bytes(call.comm),
                       [&](uint8_t* out, const uint8_t* in, uint32_t count) {
                           return kccl::all_gather_push_simple(channel, out, in, count, call.count);
                       });
}

}  // namespace kernels
}  // namespace kccl
