// Checks on CPUs that the ranks make the same call, for calls that pull. Each rank describes its
// call (description.cuh) in the cache line of the flag word "written", which its peers read anyway.
// So the comparison costs no further line.
#pragma once

#include "channel.cuh"

namespace kccl {

// Stores this call's epoch in the flag words "written" of all ranks, and describes this call beside
// them. Releases what the coop has written. Called by all threads of the coop (a thread, warp or
// block: coop.cuh).
template <class Coop, int WORLD_SIZE>
KCCL_DEVICE void say_written(Channel<Coop, WORLD_SIZE>& channel) {
    if constexpr (platform::kComparesCalls) {
        channel.describe();
        if (channel.is_described()) {
            describe_to_peers(channel.coop(), channel.comm(), channel.index(), kKcclFlagWritten,
                              channel.description());
        }
    }
    channel.template arrive<mem::Order::kRelease>(kKcclFlagWritten);
}

// Awaits "written" of the ranks [first, last), and compares their calls with this one. Called by
// all threads of the coop; all get the same status.
template <class Coop, int WORLD_SIZE>
KCCL_DEVICE Status await_written(Channel<Coop, WORLD_SIZE>& channel, int first, int last) {
    const Status written =
        channel.template await<mem::Order::kAcquire>(kKcclFlagWritten, first, last);
    if constexpr (!platform::kComparesCalls) return written;
    if (written != kKcclOk || !channel.is_described()) return written;
    const DeviceComm& comm = channel.comm();
    const Description mine = channel.description();
    for (int source = first; source < last; ++source) {
        Description theirs = mem::load_plain(description_slot(
            comm, comm.rank, channel.index(), kKcclFlagWritten, source, channel.epoch()));
        if (are_same(mine, theirs)) continue;
        // The peer has not said "written" in this call, but in a later one. On CPUs it has also
        // described this call in its own line.
        if (theirs.epoch != mine.epoch) {
            theirs = {0, mine.epoch, kUnknownCall};
            if (platform::kCpu) theirs = described(comm, source, channel.index(), mine.epoch);
        }
        refuse_call(comm, channel.awaited(), source, mine, theirs);
        return channel.leave(true);
    }
    return kKcclOk;
}

}  // namespace kccl
