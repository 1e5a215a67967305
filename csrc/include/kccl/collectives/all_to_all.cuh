// all_to_all inside a kernel. collectives.cuh says what holds for all collectives: channels,
// lengths, failures.
#pragma once

#include "../kernels/all_to_all_direct_ll16.cuh"
#include "../one_call.cuh"

namespace kccl {

// Exchanges chunks on an open channel. Called by all threads of the channel's coop (a thread, warp
// or block: coop.cuh).
//
// Sends chunk p of `in` to rank p, and stores the chunk that rank p sends here as chunk p of `out`.
// A chunk has `count` elements of T. Chunk p begins at in + p * stride or out + p * stride. The
// stride is at least `count`, which is the default. `out` is `in` or does not overlap it. The
// status, and what the coop may do on return, are as in all_reduce().
template <class T, class Coop, int WORLD_SIZE>
KCCL_DEVICE Status all_to_all(Channel<Coop, WORLD_SIZE>& channel, T* out, const T* in,
                              uint64_t count, uint64_t stride) {
    begin_together<kCoopKind<Coop>>(channel.comm(), "all_to_all",
                                    {{"channel", static_cast<uint64_t>(channel.index())},
                                     {"count", count},
                                     {"stride", stride},
                                     {"out", out},
                                     {"in", in, chunks_bytes<T>(channel, count, stride)}});
    constexpr KcclKernel kKernel = kKcclAllToAllDirectLl16;
    if (!fits<T>(channel, kKernel, count, is_stride<T>(stride, count))) {
        return refuse_stride<T>(channel, kKernel, count, stride);
    }
    return all_to_all_direct_ll16(channel, reinterpret_cast<uint8_t*>(out),
                                  reinterpret_cast<const uint8_t*>(in),
                                  static_cast<uint32_t>(count * sizeof(T)), stride * sizeof(T));
}

template <class T, class Coop, int WORLD_SIZE>
KCCL_DEVICE Status all_to_all(Channel<Coop, WORLD_SIZE>& channel, T* out, const T* in,
                              uint64_t count) {
    return all_to_all<T>(channel, out, in, count, count);
}

// Opens a channel, makes this one call on it and closes it. Called by all threads of the coop.
template <class T, class Coop>
KCCL_DEVICE Status all_to_all(Coop coop, const DeviceComm& comm, T* out, const T* in,
                              uint64_t count, int channel = kOwnChannel) {
    return on_one_channel(coop, comm, channel, [&](Channel<Coop>& opened) KCCL_INLINED {
        return all_to_all<T>(opened, out, in, count);
    });
}

// Divides the call among the blocks of the grid: see in_grid_slices() in one_call.cuh. Called by
// all threads of all blocks.
template <class T>
KCCL_DEVICE Status all_to_all(Grid, const DeviceComm& comm, T* out, const T* in, uint64_t count) {
    begin_together<CoopKind::kGrid>(comm, "all_to_all",
                                    {{"count", count}, {"out", out}, {"in", in}});
    return in_grid_slices<T>(
        comm, count, [&](Channel<Block>& channel, const Slice& slice) KCCL_INLINED {
            return all_to_all<T>(channel, out + slice.begin, in + slice.begin, slice.count, count);
        });
}

}  // namespace kccl
