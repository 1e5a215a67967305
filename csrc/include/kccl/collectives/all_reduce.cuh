// all_reduce inside a kernel. collectives.cuh says what holds for all collectives: channels,
// lengths, failures.
#pragma once

#include "../kernels/all_reduce_one_shot_ll16.cuh"
#include "../one_call.cuh"

namespace kccl {

// Reduces on an open channel. Called by all threads of the channel's coop (a thread, warp or block:
// coop.cuh).
//
// Every rank's `out` becomes the element-wise reduction of all ranks' `in`, `count` elements of T.
// On a rank, `in` and `out` are the same array or do not overlap. On return all threads have the
// same status, and the coop may read all of `out` and write `in`. Unless the status is ok, `out` is
// undefined.
template <class T, class Op = Sum, class Coop, int WORLD_SIZE>
KCCL_DEVICE Status all_reduce(Channel<Coop, WORLD_SIZE>& channel, T* out, const T* in,
                              uint64_t count) {
    begin_together<kCoopKind<Coop>>(channel.comm(), "all_reduce",
                                    {{"channel", static_cast<uint64_t>(channel.index())},
                                     {"count", count},
                                     {"out", out},
                                     {"in", in, count * sizeof(T)}});
    if constexpr (!kTakes<Op, T>) {
        return refuse_types<Op, T>();
    } else {
        if (!fits<T, Op>(channel, kKcclAllReduceOneShotLl16, count)) return channel.status();
        return all_reduce_one_shot_ll16<T, Op>(channel, out, in, static_cast<uint32_t>(count));
    }
}

// Opens a channel, makes this one call on it and closes it. Called by all threads of the coop.
template <class T, class Op = Sum, class Coop>
KCCL_DEVICE Status all_reduce(Coop coop, const DeviceComm& comm, T* out, const T* in,
                              uint64_t count, int channel = kOwnChannel) {
    return on_one_channel(coop, comm, channel, [&](Channel<Coop>& opened) KCCL_INLINED {
        return all_reduce<T, Op>(opened, out, in, count);
    });
}

// Divides the call among the blocks of the grid: see in_grid_slices() in one_call.cuh. Called by
// all threads of all blocks.
template <class T, class Op = Sum>
KCCL_DEVICE Status all_reduce(Grid, const DeviceComm& comm, T* out, const T* in, uint64_t count) {
    begin_together<CoopKind::kGrid>(comm, "all_reduce",
                                    {{"count", count}, {"out", out}, {"in", in}});
    return in_grid_slices<T>(
        comm, count, [&](Channel<Block>& channel, const Slice& slice) KCCL_INLINED {
            return all_reduce<T, Op>(channel, out + slice.begin, in + slice.begin, slice.count);
        });
}

}  // namespace kccl
