// reduce_scatter inside a kernel. collectives.cuh says what holds for all collectives: channels,
// lengths, failures.
#pragma once

#include "../kernels/reduce_scatter_direct_ll16.cuh"
#include "../one_call.cuh"

namespace kccl {

// Reduces and scatters on an open channel. Called by all threads of the channel's coop (a thread,
// warp or block: coop.cuh).
//
// This rank's `out` becomes the element-wise reduction of the chunks that all ranks have for it,
// `count` elements of T each. The chunk for rank p begins at in + p * stride; the default stride is
// `count`. `out` is this rank's chunk of `in`, or does not overlap `in`. The status, and what the
// coop may do on return, are as in all_reduce().
template <class T, class Op = Sum, class Coop, int WORLD_SIZE>
KCCL_DEVICE Status reduce_scatter(Channel<Coop, WORLD_SIZE>& channel, T* out, const T* in,
                                  uint64_t count, uint64_t stride) {
    begin_together<kCoopKind<Coop>>(channel.comm(), "reduce_scatter",
                                    {{"channel", static_cast<uint64_t>(channel.index())},
                                     {"count", count},
                                     {"stride", stride},
                                     {"out", out},
                                     {"in", in, chunks_bytes<T>(channel, count, stride)}});
    constexpr KcclKernel kKernel = kKcclReduceScatterDirectLl16;
    if constexpr (!kTakes<Op, T>) {
        return refuse_types<Op, T>();
    } else {
        if (!fits<T, Op>(channel, kKernel, count, is_stride<T>(stride, 0))) {
            return refuse_stride<T>(channel, kKernel, 0, stride);
        }
        return reduce_scatter_direct_ll16<T, Op>(channel, out, in, static_cast<uint32_t>(count),
                                                 stride);
    }
}

template <class T, class Op = Sum, class Coop, int WORLD_SIZE>
KCCL_DEVICE Status reduce_scatter(Channel<Coop, WORLD_SIZE>& channel, T* out, const T* in,
                                  uint64_t count) {
    return reduce_scatter<T, Op>(channel, out, in, count, count);
}

// Opens a channel, makes this one call on it and closes it. Called by all threads of the coop.
template <class T, class Op = Sum, class Coop>
KCCL_DEVICE Status reduce_scatter(Coop coop, const DeviceComm& comm, T* out, const T* in,
                                  uint64_t count, int channel = kOwnChannel) {
    return on_one_channel(coop, comm, channel, [&](Channel<Coop>& opened) KCCL_INLINED {
        return reduce_scatter<T, Op>(opened, out, in, count);
    });
}

// Divides the call among the blocks of the grid: see in_grid_slices() in one_call.cuh. Called by
// all threads of all blocks.
template <class T, class Op = Sum>
KCCL_DEVICE Status reduce_scatter(Grid, const DeviceComm& comm, T* out, const T* in,
                                  uint64_t count) {
    begin_together<CoopKind::kGrid>(comm, "reduce_scatter",
                                    {{"count", count}, {"out", out}, {"in", in}});
    return in_grid_slices<T>(comm, count,
                             [&](Channel<Block>& channel, const Slice& slice) KCCL_INLINED {
                                 return reduce_scatter<T, Op>(channel, out + slice.begin,
                                                              in + slice.begin, slice.count, count);
                             });
}

}  // namespace kccl
