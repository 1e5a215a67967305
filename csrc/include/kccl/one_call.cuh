// The common part of the collectives inside a kernel: which arguments they refuse, how a coop makes
// one call without an open channel, and how the blocks of a grid make a call together.
// collectives.cuh has the contract.
#pragma once

#include "channel.cuh"
#include "grid.cuh"
#include "payload.cuh"
#include "reduce.cuh"

namespace kccl {

// The largest count or stride of elements of T. Larger ones would be more bytes than any memory
// has.
template <class T>
constexpr uint64_t kMostElements = (uint64_t{1} << 60) / sizeof(T);

// Whether calls check that their root and their strides are in range. On GPUs they do not, because
// between two H100 the checks took 3 to 10 % of a call of 8 bytes.
constexpr bool kComparesAll = told::kIsTold || platform::kCpu;

// Fails the call because of an argument. If the opening of the channel found an earlier failure,
// the status and the record remain those of that failure. Called by all threads of the coop (a
// thread, warp or block: coop.cuh).
template <class Coop, int WORLD_SIZE>
KCCL_DEVICE Status refuse_on(Channel<Coop, WORLD_SIZE>& channel, uint32_t kernel,
                             const Refused& why) {
    channel.check();
    if (channel.status() == kKcclOk && leads(channel.coop())) {
        refuse(channel.comm(), kernel, channel.awaited().channel, why);
    }
    channel.leave(true);
    return channel.status();
}

// Returns true if the call can be made: there is something to send, the `count` elements of T fit
// in a message, and are_right. If they do not fit, fails the call. are_right: whether the other
// arguments are valid; if not, the caller must refuse them. If the call can be made, this takes one
// branch only. Called by all threads of the coop. `Op` and `root` are for the simulator, which
// compares the ranks' calls; void and -1 for none.
template <class T, class Op = void, class Coop, int WORLD_SIZE>
KCCL_DEVICE bool fits(Channel<Coop, WORLD_SIZE>& channel, uint32_t kernel, uint64_t count,
                      bool are_right = true, int root = -1) {
    // The number of bytes wraps if the count is too large, so the count is checked too. To compare
    // only counts, each call would have to divide max_bytes(), which took 3 % of a call of 8 bytes
    // between two H100 (bench/LOG.md).
    const bool is_plain = count * sizeof(T) - 1 < channel.max_bytes() && count <= kMostElements<T>;
    if (told::kIsTold && are_right && (is_plain || count == 0)) {
        channel.tell({kernel, count * sizeof(T), kDtypeOf<T>, kOpOf<Op>, root});
    }
    if (is_plain & are_right) return true;
    if (!are_right) return false;
    if (count > kMostElements<T>) {
        refuse_on(channel, kernel, {kKcclArgumentCount, count, channel.max_bytes() / sizeof(T)});
        return false;
    }
    // If the channel has failed before, the status and the record of that failure remain.
    channel.check();
    if (count == 0) return false;
    if (channel.status() == kKcclOk && leads(channel.coop())) {
        refuse_length(channel.comm(), kernel, channel.awaited().channel, count * sizeof(T),
                      channel.comm().layout.packet_bytes);
    }
    channel.leave(true);
    return false;
}

// Returns the bytes of all ranks' chunks, of `count` elements each, if the chunks are contiguous;
// else the bytes of the first chunk.
template <class T, class Coop, int WORLD_SIZE>
KCCL_DEVICE uint64_t chunks_bytes(const Channel<Coop, WORLD_SIZE>& channel, uint64_t count,
                                  uint64_t stride) {
    return (stride == count ? count * channel.world_size() : count) * sizeof(T);
}

// Tells whether chunks may begin `stride` elements of T apart: at least `least`, and not more
// elements than any memory has. On targets that do not check strides, always returns true.
template <class T>
KCCL_DEVICE bool is_stride(uint64_t stride, uint64_t least) {
    return !kComparesAll || stride - least < kMostElements<T>;
}
// Fails the call if is_stride() is false. Called by all threads of the coop, which all get the
// status.
template <class T, class Coop, int WORLD_SIZE>
KCCL_DEVICE Status refuse_stride(Channel<Coop, WORLD_SIZE>& channel, uint32_t kernel,
                                 uint64_t least, uint64_t stride) {
    if (is_stride<T>(stride, least)) return channel.status();
    const uint64_t limit = stride < least ? least : kMostElements<T>;
    return refuse_on(channel, kernel, {kKcclArgumentStride, stride, limit});
}

// A value for the argument `channel` of a call: the coop's own channel (default_channel()).
constexpr int kOwnChannel = -0x7fffffff - 1;

// Makes one call on a channel that is opened for it. make(channel) -> Status. Called by all threads
// of the coop.
template <class Coop, class Make>
KCCL_DEVICE Status on_one_channel(Coop coop, const DeviceComm& comm, int channel, Make make) {
    const int index = channel == kOwnChannel ? default_channel(coop) : channel;
    Channel<Coop> opened(coop, comm, index, 0, Opening::kOneCall);
    return make(opened);
}

// The coop of all blocks of a kernel. All blocks must be resident at the same time, and a rank may
// run only one such kernel at a time.
struct Grid {};
KCCL_DEVICE Grid grid() { return {}; }

// Returns this block's slice of a call by the grid. If the message is longer than any memory,
// returns all of it, so that every block refuses the call.
template <class T>
KCCL_DEVICE Slice grid_slice(uint64_t count) {
    return count > kMostElements<T> ? Slice{0, count} : block_slice<T>(count);
}

// Makes a call by the grid: each block makes the call for its slice, then the blocks synchronise,
// so that any block may read the whole result. make(channel, slice) -> Status. Called by all
// threads of all blocks. If other blocks have written a block's slice of the input, the caller must
// synchronise the blocks before the call.
template <class T, class Make>
KCCL_DEVICE Status in_grid_slices(const DeviceComm& comm, uint64_t count, Make make) {
    const Slice slice = grid_slice<T>(count);
    {
        Channel<Block> opened(block(), comm, default_channel(block()), 0, Opening::kOneCall);
        opened.tell_of_grid();
        // The status of make() is ignored: if a call has failed, grid_sync() returns the failure.
        make(opened, slice);
    }
    return grid_sync(comm);
}

}  // namespace kccl
