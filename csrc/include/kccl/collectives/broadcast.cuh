// broadcast inside a kernel. collectives.cuh says what holds for all collectives: channels,
// lengths, failures.
#pragma once

#include "../kernels/broadcast_direct_ll16.cuh"
#include "../one_call.cuh"

namespace kccl {

// Broadcasts on an open channel. Called by all threads of the channel's coop (a thread, warp or
// block: coop.cuh).
//
// Copies the root's `in`, `count` elements of T, to the `out` of every other rank. The root does
// not write its `out`, and the other ranks do not read their `in`. The status, and what the coop
// may do on return, are as in all_reduce().
template <class T, class Coop, int WORLD_SIZE>
KCCL_DEVICE Status broadcast(Channel<Coop, WORLD_SIZE>& channel, T* out, const T* in,
                             uint64_t count, int root) {
    begin_together<kCoopKind<Coop>>(
        channel.comm(), "broadcast",
        {{"channel", static_cast<uint64_t>(channel.index())},
         {"count", count},
         {"root", static_cast<uint64_t>(root)},
         {"out", out},
         {"in", in, channel.comm().rank == root ? count * sizeof(T) : 0}});
    constexpr KcclKernel kKernel = kKcclBroadcastDirectLl16;
    const bool is_rank = !kComparesAll || !is_outside(root, channel.world_size());
    if (!fits<T>(channel, kKernel, count, is_rank, root)) {
        if (is_rank) return channel.status();
        return refuse_on(
            channel, kKernel,
            {kKcclArgumentRoot, uint64_t(int64_t{root}), uint64_t(channel.world_size())});
    }
    return broadcast_direct_ll16(channel, reinterpret_cast<uint8_t*>(out),
                                 reinterpret_cast<const uint8_t*>(in),
                                 static_cast<uint32_t>(count * sizeof(T)), root);
}

// Opens a channel, makes this one call on it and closes it. Called by all threads of the coop.
template <class T, class Coop>
KCCL_DEVICE Status broadcast(Coop coop, const DeviceComm& comm, T* out, const T* in, uint64_t count,
                             int root, int channel = kOwnChannel) {
    return on_one_channel(coop, comm, channel, [&](Channel<Coop>& opened) KCCL_INLINED {
        return broadcast(opened, out, in, count, root);
    });
}

// Divides the call among the blocks of the grid: see in_grid_slices() in one_call.cuh. Called by
// all threads of all blocks.
template <class T>
KCCL_DEVICE Status broadcast(Grid, const DeviceComm& comm, T* out, const T* in, uint64_t count,
                             int root) {
    begin_together<CoopKind::kGrid>(
        comm, "broadcast",
        {{"count", count}, {"root", static_cast<uint64_t>(root)}, {"out", out}, {"in", in}});
    return in_grid_slices<T>(
        comm, count, [&](Channel<Block>& channel, const Slice& slice) KCCL_INLINED {
            return broadcast(channel, out + slice.begin, in + slice.begin, slice.count, root);
        });
}

}  // namespace kccl
