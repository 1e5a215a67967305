// Whether the ranks make the same call, for the calls of CPUs that pull. Each rank describes its
// call beside the flag word "written", in the same line. So the comparison costs no further line.
//
// There is a description for each parity, because a rank may say "written" in the next call before
// a peer has read what it said in this one. In the call after that it knows that the peer has.
#pragma once

#include "channel.cuh"

namespace kccl {

struct Description {
    uint64_t num_bytes;
    uint32_t epoch;
    uint32_t call;  // as one half of KcclRecord.calls
};
static_assert(3 * sizeof(Description) <= kKcclLineBytes, "behind the flag word, in its line");
constexpr uint32_t kUnknownCall = 255u << 8;
static_assert(kKcclNumKernels <= kUnknownCall >> 8, "a kernel has 8 bits, and 255 is no kernel");
static_assert(kKcclNumDtypes <= 16 && kKcclNumOps <= 16, "element type and operator have 4 bits");

template <class Coop, int WORLD_SIZE>
KCCL_DEVICE Description* description_slot(const Channel<Coop, WORLD_SIZE>& channel, int rank,
                                          int source) {
    uint32_t* word = flag_word(channel.comm(), rank, channel.index(), kKcclFlagWritten, source);
    return reinterpret_cast<Description*>(word) + 1 + channel.parity();
}

// This rank's call; bytes_per_count: of the message, by call.count.
template <class Coop, int WORLD_SIZE>
KCCL_DEVICE Description description_of(const Channel<Coop, WORLD_SIZE>& channel,
                                       uint64_t bytes_per_count) {
    const Call& call = *channel.call();
    return {call.count * bytes_per_count, channel.epoch(),
            call.kernel << 8 | call.dtype << 4 | call.op};
}

// Says "written" to all ranks, and which call this is. Releases what the coop has written. Called
// by all threads of the coop.
template <class Coop, int WORLD_SIZE>
KCCL_DEVICE void say_written(Channel<Coop, WORLD_SIZE>& channel, uint64_t bytes_per_count) {
    const Coop coop = channel.coop();
    const int rank = channel.comm().rank;
    if (platform::kComparesCalls && channel.call() != nullptr) {
        const Description mine = description_of(channel, bytes_per_count);
        for (int peer = coop.index(); peer < channel.comm().world_size; peer += coop.size()) {
            mem::store_plain(description_slot(channel, peer, rank), mine);
        }
    }
    channel.template arrive<mem::Order::kRelease>(kKcclFlagWritten);
}

// Fails this rank because `source` makes another call.
template <class Coop, int WORLD_SIZE>
KCCL_DEVICE_COLD Status refuse_call(Channel<Coop, WORLD_SIZE>& channel, int source,
                                    Description mine, Description theirs) {
    constexpr uint64_t kMost = 0xffffffff;
    const auto most = [](uint64_t bytes) {
        return static_cast<uint32_t>(bytes < kMost ? bytes : kMost);
    };
    if (theirs.epoch != mine.epoch) theirs = {0, 0, kUnknownCall};
    const DeviceComm& comm = channel.comm();
    give_up(comm, Record{kKcclCallsDiffer, comm.rank, source, channel.awaited().kernel,
                         channel.awaited().channel, most(mine.num_bytes), most(theirs.num_bytes),
                         theirs.call << 16 | mine.call, 0});
    return channel.leave(true);
}

// Awaits "written" of the ranks [first, last), and compares their calls with this one. Called by
// all threads of the coop; all get the same status.
template <class Coop, int WORLD_SIZE>
KCCL_DEVICE Status await_written(Channel<Coop, WORLD_SIZE>& channel, uint64_t bytes_per_count,
                                 int first, int last) {
    const Status written =
        channel.template await<mem::Order::kAcquire>(kKcclFlagWritten, first, last);
    if constexpr (!platform::kComparesCalls) return written;
    if (written != kKcclOk || channel.call() == nullptr) return written;
    const Description mine = description_of(channel, bytes_per_count);
    for (int source = first; source < last; ++source) {
        const Description theirs =
            mem::load_plain(description_slot(channel, channel.comm().rank, source));
        const bool is_same = theirs.num_bytes == mine.num_bytes && theirs.epoch == mine.epoch &&
                             theirs.call == mine.call;
        if (!is_same) return refuse_call(channel, source, mine, theirs);
    }
    return kKcclOk;
}

}  // namespace kccl
