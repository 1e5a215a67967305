// The collectives from inside a kernel.
//
//     Status all_reduce<T, Op>(coop, comm, out, in, count)       warp(), block() or grid() acts
//     Status reduce_scatter<T, Op>(coop, comm, out, in, count)
//     Status all_gather<T>(coop, comm, out, in, count)
//     Status broadcast<T>(coop, comm, out, in, count, root)
//     Status barrier(coop, comm)
//
//     Channel channel(block(), comm);                            for many calls: opened once
//     for (...) status = all_reduce<T, Op>(channel, out, in, count);
//
// A call without a channel uses the coop's own: a block's index in the grid, a warp's index among
// all warps; each block of a grid uses its own. On every rank the same channels make the same
// calls, in the same order. A call without an open channel opens one, which costs two trips to the
// L2 cache. So a kernel of many calls keeps it open.
//
// Each coop's message is at most DeviceComm's max_bytes long (in reduce_scatter and all_gather:
// what one rank sends to another). A longer one is an error, and so are a channel or a root that
// does not exist: nothing is sent, and the record names the argument. An error stays: whatever is
// opened after it returns it at once, and so does every later call on what returned it. What was
// open before may still complete calls whose data has come. It learns of the error in its next wait
// that is not satisfied at once.
#pragma once

#include "grid.cuh"
#include "kernels/all_gather_direct_ll16.cuh"
#include "kernels/all_reduce_one_shot_ll16.cuh"
#include "kernels/barrier_direct.cuh"
#include "kernels/broadcast_direct_ll16.cuh"
#include "kernels/reduce_scatter_direct_ll16.cuh"

namespace kccl {

// No count or stride of elements of T is larger: more bytes than any memory has.
template <class T>
constexpr uint64_t kMostElements = (uint64_t{1} << 60) / sizeof(T);

// Whether calls compare their root and their strides. On GPUs they do not: between two H100 this
// took 3 to 10 % of a call of 8 bytes.
constexpr bool kComparesAll = told::kIsTold || platform::kCpu;

// Fails the call because of an argument. An earlier failure, which the opening of the channel
// found, stays. Called by all threads of the coop.
template <class Coop, int WORLD_SIZE>
KCCL_DEVICE Status refuse_on(Channel<Coop, WORLD_SIZE>& channel, KcclKernel kernel,
                             const Refused& why) {
    channel.check();
    if (channel.status() == kKcclOk && leads(channel.coop())) {
        refuse(channel.comm(), kernel, channel.awaited().channel, why);
    }
    channel.leave(true);
    return channel.status();
}

// Whether there is something to send, `count` elements of T, and it fits. If it does not fit, the
// call has failed. are_right: whether the other arguments are; if not, the caller refuses them. All
// of it is one branch where a call can be made. Called by all threads of the coop. `Op` and `root`:
// for the simulator, which compares the ranks' calls; void and -1 for none.
template <class T, class Op = void, class Coop, int WORLD_SIZE>
KCCL_DEVICE bool fits(Channel<Coop, WORLD_SIZE>& channel, KcclKernel kernel, uint64_t count,
                      bool are_right = true, int root = -1) {
    // Slots have whole elements. In bytes a count that is too large could wrap.
    const uint64_t most = channel.max_bytes() / sizeof(T);
    const bool is_plain = count - 1 < most;
    if (told::kIsTold && are_right && (is_plain || count == 0)) {
        channel.tell({kernel, count * sizeof(T), kDtypeOf<T>, kOpOf<Op>, root});
    }
    if (is_plain & are_right) return true;
    if (!are_right) return false;
    if (count > kMostElements<T>) {
        refuse_on(channel, kernel, {kKcclArgumentCount, count, most});
        return false;
    }
    // As in refuse_on().
    channel.check();
    if (count == 0) return false;
    if (channel.status() == kKcclOk && leads(channel.coop())) {
        refuse_length(channel.comm(), kernel, channel.awaited().channel, count * sizeof(T),
                      channel.comm().layout.packet_bytes);
    }
    channel.leave(true);
    return false;
}

// Whether chunks may lie `stride` elements of T apart, at least `least`.
template <class T>
KCCL_DEVICE bool is_stride(uint64_t stride, uint64_t least) {
    return !kComparesAll || stride - least < kMostElements<T>;
}
// Fails the call if they may not. Called by all threads of the coop; all get the status.
template <class T, class Coop, int WORLD_SIZE>
KCCL_DEVICE Status refuse_stride(Channel<Coop, WORLD_SIZE>& channel, KcclKernel kernel,
                                 uint64_t least, uint64_t stride) {
    if (is_stride<T>(stride, least)) return channel.status();
    const uint64_t limit = stride < least ? least : kMostElements<T>;
    return refuse_on(channel, kernel, {kKcclArgumentStride, stride, limit});
}

// ---- On an open channel: called by all threads of its coop --------------------------------------

// Every rank's `out` becomes the element-wise reduction of all ranks' `in`, `count` elements of T.
// They are the same array or do not overlap. On return all threads have the same status, and the
// coop may read all of `out` and write `in`. Unless the status is ok, `out` is undefined.
template <class T, class Op = Sum, class Coop, int WORLD_SIZE>
KCCL_DEVICE Status all_reduce(Channel<Coop, WORLD_SIZE>& channel, T* out, const T* in,
                              uint64_t count) {
    begin_together<kCoopKind<Coop>>(channel.comm(), "all_reduce",
                                    {{"channel", static_cast<uint64_t>(channel.index())},
                                     {"count", count},
                                     {"out", out},
                                     {"in", in}});
    if (!fits<T, Op>(channel, kKcclAllReduceOneShotLl16, count)) return channel.status();
    return all_reduce_one_shot_ll16<T, Op>(channel, out, in, static_cast<uint32_t>(count));
}

// This rank's `out` becomes the element-wise reduction of all ranks' chunks for it, `count`
// elements of T. The chunk for rank p is at in + p * stride; the default stride is `count`. `out`
// is this rank's chunk of `in`, or does not overlap it. Otherwise as all_reduce().
template <class T, class Op = Sum, class Coop, int WORLD_SIZE>
KCCL_DEVICE Status reduce_scatter(Channel<Coop, WORLD_SIZE>& channel, T* out, const T* in,
                                  uint64_t count, uint64_t stride) {
    begin_together<kCoopKind<Coop>>(channel.comm(), "reduce_scatter",
                                    {{"channel", static_cast<uint64_t>(channel.index())},
                                     {"count", count},
                                     {"stride", stride},
                                     {"out", out},
                                     {"in", in}});
    constexpr KcclKernel kKernel = kKcclReduceScatterDirectLl16;
    if (!fits<T, Op>(channel, kKernel, count, is_stride<T>(stride, 0))) {
        return refuse_stride<T>(channel, kKernel, 0, stride);
    }
    return reduce_scatter_direct_ll16<T, Op>(channel, out, in, static_cast<uint32_t>(count),
                                             stride);
}

template <class T, class Op = Sum, class Coop, int WORLD_SIZE>
KCCL_DEVICE Status reduce_scatter(Channel<Coop, WORLD_SIZE>& channel, T* out, const T* in,
                                  uint64_t count) {
    return reduce_scatter<T, Op>(channel, out, in, count, count);
}

// Every rank's `out` gets all ranks' `in`: the `count` elements of T of rank p go to out + p *
// stride; the default stride is `count`, and no stride is smaller. `in` is this rank's chunk of
// `out`, or does not overlap it. Otherwise as all_reduce().
template <class T, class Coop, int WORLD_SIZE>
KCCL_DEVICE Status all_gather(Channel<Coop, WORLD_SIZE>& channel, T* out, const T* in,
                              uint64_t count, uint64_t stride) {
    begin_together<kCoopKind<Coop>>(channel.comm(), "all_gather",
                                    {{"channel", static_cast<uint64_t>(channel.index())},
                                     {"count", count},
                                     {"stride", stride},
                                     {"out", out},
                                     {"in", in}});
    constexpr KcclKernel kKernel = kKcclAllGatherDirectLl16;
    if (!fits<T>(channel, kKernel, count, is_stride<T>(stride, count))) {
        return refuse_stride<T>(channel, kKernel, count, stride);
    }
    return all_gather_direct_ll16(channel, reinterpret_cast<uint8_t*>(out),
                                  reinterpret_cast<const uint8_t*>(in),
                                  static_cast<uint32_t>(count * sizeof(T)), stride * sizeof(T));
}

template <class T, class Coop, int WORLD_SIZE>
KCCL_DEVICE Status all_gather(Channel<Coop, WORLD_SIZE>& channel, T* out, const T* in,
                              uint64_t count) {
    return all_gather<T>(channel, out, in, count, count);
}

// Every rank's `out` becomes the root's `in`: `count` elements of T. The root writes no `out`, the
// others read no `in`. Otherwise as all_reduce().
template <class T, class Coop, int WORLD_SIZE>
KCCL_DEVICE Status broadcast(Channel<Coop, WORLD_SIZE>& channel, T* out, const T* in,
                             uint64_t count, int root) {
    begin_together<kCoopKind<Coop>>(channel.comm(), "broadcast",
                                    {{"channel", static_cast<uint64_t>(channel.index())},
                                     {"count", count},
                                     {"root", static_cast<uint64_t>(root)},
                                     {"out", out},
                                     {"in", in}});
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

// Waits for the same coop of every rank: see barrier_direct().
template <mem::Order order = mem::Order::kAcqRel, class Coop, int WORLD_SIZE>
KCCL_DEVICE Status barrier(Channel<Coop, WORLD_SIZE>& channel) {
    begin_together<kCoopKind<Coop>>(channel.comm(), "barrier",
                                    {{"channel", static_cast<uint64_t>(channel.index())}});
    channel.tell({kKcclBarrierDirect, 0});
    return barrier_direct<order>(channel);
}

// ---- The same for one call: called by all threads of the coop -----------------------------------

template <class T, class Op = Sum, class Coop>
KCCL_DEVICE Status all_reduce(Coop coop, const DeviceComm& comm, T* out, const T* in,
                              uint64_t count, int channel) {
    Channel<Coop> opened(coop, comm, channel, 0, Opening::kOneCall);
    return all_reduce<T, Op>(opened, out, in, count);
}

template <class T, class Op = Sum, class Coop>
KCCL_DEVICE Status all_reduce(Coop coop, const DeviceComm& comm, T* out, const T* in,
                              uint64_t count) {
    return all_reduce<T, Op>(coop, comm, out, in, count, default_channel(coop));
}

template <class T, class Op = Sum, class Coop>
KCCL_DEVICE Status reduce_scatter(Coop coop, const DeviceComm& comm, T* out, const T* in,
                                  uint64_t count, int channel) {
    Channel<Coop> opened(coop, comm, channel, 0, Opening::kOneCall);
    return reduce_scatter<T, Op>(opened, out, in, count);
}

template <class T, class Op = Sum, class Coop>
KCCL_DEVICE Status reduce_scatter(Coop coop, const DeviceComm& comm, T* out, const T* in,
                                  uint64_t count) {
    return reduce_scatter<T, Op>(coop, comm, out, in, count, default_channel(coop));
}

template <class T, class Coop>
KCCL_DEVICE Status all_gather(Coop coop, const DeviceComm& comm, T* out, const T* in,
                              uint64_t count, int channel) {
    Channel<Coop> opened(coop, comm, channel, 0, Opening::kOneCall);
    return all_gather<T>(opened, out, in, count);
}

template <class T, class Coop>
KCCL_DEVICE Status all_gather(Coop coop, const DeviceComm& comm, T* out, const T* in,
                              uint64_t count) {
    return all_gather<T>(coop, comm, out, in, count, default_channel(coop));
}

template <class T, class Coop>
KCCL_DEVICE Status broadcast(Coop coop, const DeviceComm& comm, T* out, const T* in, uint64_t count,
                             int root, int channel) {
    Channel<Coop> opened(coop, comm, channel, 0, Opening::kOneCall);
    return broadcast(opened, out, in, count, root);
}

template <class T, class Coop>
KCCL_DEVICE Status broadcast(Coop coop, const DeviceComm& comm, T* out, const T* in, uint64_t count,
                             int root) {
    return broadcast(coop, comm, out, in, count, root, default_channel(coop));
}

template <mem::Order order = mem::Order::kAcqRel, class Coop>
KCCL_DEVICE Status barrier(Coop coop, const DeviceComm& comm) {
    Channel<Coop> opened(coop, comm, default_channel(coop), 0, Opening::kOneCall);
    return barrier<order>(opened);
}

// ---- Called by all threads of all blocks of the kernel ------------------------------------------

// Its blocks are all resident, and one such kernel at a time runs on a rank.
struct Grid {};
KCCL_DEVICE Grid grid() { return {}; }

// This block's slice. If no memory can hold the message, every block takes all of it, and so
// refuses it.
template <class T>
KCCL_DEVICE Slice grid_slice(uint64_t count) {
    return count > kMostElements<T> ? Slice{0, count} : block_slice<T>(count);
}

// Complete for the whole message: each block exchanges its slice, then the blocks synchronise, so
// any block may read all of `out`. The caller synchronises what other blocks wrote to `in`.
template <class T, class Op = Sum>
KCCL_DEVICE Status all_reduce(Grid, const DeviceComm& comm, T* out, const T* in, uint64_t count) {
    begin_together<CoopKind::kGrid>(comm, "all_reduce",
                                    {{"count", count}, {"out", out}, {"in", in}});
    const Slice slice = grid_slice<T>(count);
    {
        Channel<Block> opened(block(), comm, default_channel(block()), 0, Opening::kOneCall);
        opened.tell_of_grid();
        // Its status is the communicator's, which the last line returns.
        all_reduce<T, Op>(opened, out + slice.begin, in + slice.begin, slice.count);
    }
    return grid_sync(comm);
}

template <class T, class Op = Sum>
KCCL_DEVICE Status reduce_scatter(Grid, const DeviceComm& comm, T* out, const T* in,
                                  uint64_t count) {
    begin_together<CoopKind::kGrid>(comm, "reduce_scatter",
                                    {{"count", count}, {"out", out}, {"in", in}});
    const Slice slice = grid_slice<T>(count);
    {
        Channel<Block> opened(block(), comm, default_channel(block()), 0, Opening::kOneCall);
        opened.tell_of_grid();
        reduce_scatter<T, Op>(opened, out + slice.begin, in + slice.begin, slice.count, count);
    }
    return grid_sync(comm);
}

template <class T>
KCCL_DEVICE Status all_gather(Grid, const DeviceComm& comm, T* out, const T* in, uint64_t count) {
    begin_together<CoopKind::kGrid>(comm, "all_gather",
                                    {{"count", count}, {"out", out}, {"in", in}});
    const Slice slice = grid_slice<T>(count);
    {
        Channel<Block> opened(block(), comm, default_channel(block()), 0, Opening::kOneCall);
        opened.tell_of_grid();
        all_gather<T>(opened, out + slice.begin, in + slice.begin, slice.count, count);
    }
    return grid_sync(comm);
}

template <class T>
KCCL_DEVICE Status broadcast(Grid, const DeviceComm& comm, T* out, const T* in, uint64_t count,
                             int root) {
    begin_together<CoopKind::kGrid>(
        comm, "broadcast",
        {{"count", count}, {"root", static_cast<uint64_t>(root)}, {"out", out}, {"in", in}});
    const Slice slice = grid_slice<T>(count);
    {
        Channel<Block> opened(block(), comm, default_channel(block()), 0, Opening::kOneCall);
        opened.tell_of_grid();
        broadcast(opened, out + slice.begin, in + slice.begin, slice.count, root);
    }
    return grid_sync(comm);
}

// What any block of any rank wrote before is visible to every block of every rank after it.
KCCL_DEVICE Status barrier(Grid, const DeviceComm& comm) {
    begin_together<CoopKind::kGrid>(comm, "barrier", {{"blocks", platform::blocks_per_grid()}});
    const Status before = grid_sync(comm);
    if (before != kKcclOk) return before;
    if (platform::block_in_grid() == 0) barrier(block(), comm);
    return grid_sync(comm);
}

}  // namespace kccl
