// barrier inside a kernel. collectives.cuh says what holds for all collectives: channels, lengths,
// failures.
#pragma once

#include "../kernels/barrier_direct.cuh"
#include "../one_call.cuh"

namespace kccl {

// Waits on an open channel until the coops of all ranks have called barrier() on this channel: see
// barrier_direct(). Called by all threads of the channel's coop (a thread, warp or block:
// coop.cuh).
template <mem::Order order = mem::Order::kAcqRel, class Coop, int WORLD_SIZE>
KCCL_DEVICE Status barrier(Channel<Coop, WORLD_SIZE>& channel) {
    begin_together<kCoopKind<Coop>>(channel.comm(), "barrier",
                                    {{"channel", static_cast<uint64_t>(channel.index())}});
    channel.tell({kKcclBarrierDirect, 0});
    return barrier_direct<order>(channel);
}

// Opens the coop's own channel, makes this one call on it and closes it. Called by all threads of
// the coop.
template <mem::Order order = mem::Order::kAcqRel, class Coop>
KCCL_DEVICE Status barrier(Coop coop, const DeviceComm& comm) {
    return on_one_channel(coop, comm, kOwnChannel, [&](Channel<Coop>& opened) KCCL_INLINED {
        return barrier<order>(opened);
    });
}

// Waits until all blocks of this kernel have arrived on all ranks. What any of these blocks wrote
// before the barrier is visible to all of them after it. Called by all threads of all blocks of the
// kernel.
KCCL_DEVICE Status barrier(Grid, const DeviceComm& comm) {
    begin_together<CoopKind::kGrid>(comm, "barrier", {{"blocks", platform::blocks_per_grid()}});
    const Status before = grid_sync(comm);
    if (before != kKcclOk) return before;
    if (platform::block_in_grid() == 0) barrier(block(), comm);
    return grid_sync(comm);
}

}  // namespace kccl
