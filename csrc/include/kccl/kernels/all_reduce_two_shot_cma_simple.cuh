// all_reduce, two_shot, cross-memory attach, simple protocol: for CPUs, and messages that are
// longer than the caches. Rank r owns chunk r of the message. No input is copied to the staging.
//
//     "written"        each rank has written where its `in` and `out` lie in its process
//     reduce-scatter   chunk r of each peer's `in` --read_peer, piece by piece--> rows in its own
//                      staging --reduce with its own--> chunk r of `out`; "reduced"
//     all-gather       chunk p of each peer p's `out` --read_peer--> `out`; "pulled"
//
//     traffic in per rank: 2 * (world_size - 1) / world_size * n bytes, each byte moved once
//
// n is the length of `in` in bytes. `out` may be `in`. Before all ranks have said "reduced", only
// rank r itself reads chunk r of its arrays, so it may overwrite that chunk with its result. Each
// other rank p reads chunk p of rank r's `in` before it says "reduced", and rank r overwrites its
// own chunk p only after that. The call ends when all ranks have said "pulled", because then nobody
// reads the caller's arrays any more. A rank that gives up returns to its caller earlier, but first
// tells its peers by its abort words. So each rank checks the abort words after its last read, and
// does not use what it read from a rank that gave up.
//
// Some memory cannot be read by another process, as some drivers' pinned memory; the rank that owns
// the memory finds this out. A process may also forbid, after start-up, that other processes read
// its memory, as by prctl(PR_SET_DUMPABLE); its peers find this out. In both cases all ranks make
// the call by all_reduce_two_shot_pull_simple instead.
#pragma once

#include "../reduce.cuh"
#include "../same_call.cuh"
#include "all_reduce_two_shot_pull_simple.cuh"

namespace kccl {

// The addresses of a rank's arrays, and whether peers can read them. Each rank writes this to its
// staging for its peers.
struct Whereabouts {
    uint64_t in;
    uint64_t out;
    uint64_t is_readable;
};

// Returns true if other processes can read the array. To find out, this process reads the array's
// first and last byte by the system call that a peer would use.
KCCL_DEVICE bool is_readable(const DeviceComm& comm, const void* array, uint64_t num_bytes) {
    const uint64_t context = state_of(comm)->idle_context;
    const auto address = reinterpret_cast<uint64_t>(array);
    uint8_t ends[2];
    return mem::read_peer(context, comm.rank, &ends[0], address, 1) == 0 &&
           mem::read_peer(context, comm.rank, &ends[1], address + num_bytes - 1, 1) == 0;
}

KCCL_DEVICE bool may_read_all(const DeviceComm& comm) {
    bool may = true;
    for (int peer = 0; peer < comm.world_size; ++peer) {
        may = may && (peer == comm.rank || mem::may_read_peer(state_of(comm)->idle_context, peer));
    }
    return may;
}

// Fails the call because read_peer() could not read a peer's memory. `error`: its errno. Finds out
// whether the peer gave up and freed the memory, or its process has ended; otherwise the record
// gets the errno.
KCCL_DEVICE_COLD void give_up_reading(const DeviceComm& comm, Awaited awaited, int peer,
                                      int error) {
    constexpr int kNoSuchProcess = 3;  // ESRCH; run-time compilers have no <errno.h>
    uint32_t left = 0;
    if (!nobody_gave_up(comm, &left)) return;
    const bool is_lost = error == kNoSuchProcess;
    const auto seen = is_lost ? awaited.wanted : static_cast<uint32_t>(error);
    give_up(comm,
            Record{static_cast<uint32_t>(is_lost ? kKcclPeerLost : kKcclUnreadable), comm.rank,
                   peer, awaited.kernel, awaited.channel, seen, awaited.wanted, 0, 0});
}

// Sets every rank's `out` to the reduction of all ranks' `in`, `count` elements of T. `count` may
// be any number. The coop is one thread, as a CPU's block is. All else is as in
// all_reduce_one_shot_ll16(). The planner has checked that every rank's process may read every
// other's memory.
template <class T, class Op, class Coop, int WORLD_SIZE>
KCCL_DEVICE Status all_reduce_two_shot_cma_simple(Channel<Coop, WORLD_SIZE>& channel, T* out,
                                                  const T* in, uint64_t count,
                                                  const Op& op = Op{}) {
    const DeviceComm& comm = channel.comm();
    const Coop coop = channel.coop();
    const int world_size = comm.world_size;
    const uint64_t context = state_of(comm)->idle_context;
    const uint64_t line = kKcclLineBytes / sizeof(T);
    const uint64_t chunk = (count + world_size * line - 1) / (world_size * line) * line;
    uint64_t first[kKcclMaxWorldSize + 1];
    for (int rank = 0; rank <= world_size; ++rank) {
        first[rank] = rank * chunk < count ? rank * chunk : count;
    }

    const Status entered = channel.next(kKcclAllReduceTwoShotCmaSimple, Exchange::kPairwise);
    if (entered != kKcclOk) return entered;
    mem::store_plain(
        staging_slot<Whereabouts>(comm, comm.rank, channel.index(), channel.parity(), Half::kInput),
        Whereabouts{reinterpret_cast<uint64_t>(in), reinterpret_cast<uint64_t>(out),
                    is_readable(comm, in, count * sizeof(T)) &&
                        is_readable(comm, out, count * sizeof(T)) && may_read_all(comm)});
    say_written(channel);
    const Status written = await_written(channel, 0, world_size);
    if (written != kKcclOk) return written;
    Whereabouts peers[kKcclMaxWorldSize];
    bool all_readable = true;
    for (int peer = 0; peer < world_size; ++peer) {
        peers[peer] = mem::load_plain(
            staging_slot<Whereabouts>(comm, peer, channel.index(), channel.parity(), Half::kInput));
        all_readable = all_readable && peers[peer].is_readable != 0;
    }
    if (!all_readable) {
        channel.leave();
        return all_reduce_two_shot_pull_simple<T, Op>(channel, out, in, count, op);
    }

    // The peers' rows of one piece are read into this rank's result half of the staging, which no
    // peer reads in this call.
    T* rows = staging_slot<T>(comm, comm.rank, channel.index(), channel.parity(), Half::kResult);
    const uint64_t piece = comm.layout.staging_bytes / world_size / kKcclLineBytes * line;
    for (uint64_t begin = first[comm.rank]; begin < first[comm.rank + 1]; begin += piece) {
        const uint64_t rest = first[comm.rank + 1] - begin;
        const uint64_t n = rest < piece ? rest : piece;
        const T* inputs[kKcclMaxWorldSize];
        for (int peer = 0; peer < world_size; ++peer) {
            inputs[peer] = peer == comm.rank ? in + begin : rows + peer * piece;
            if (peer == comm.rank) continue;
            const int error = mem::read_peer(context, peer, rows + peer * piece,
                                             peers[peer].in + begin * sizeof(T), n * sizeof(T));
            if (error != 0) {
                give_up_reading(comm, channel.awaited(), peer, error);
                return channel.leave(true);
            }
        }
        reduce_rows<T, Op>(coop, out + begin, inputs, world_size, n, op);
    }
    channel.template arrive<mem::Order::kRelease>(kKcclFlagReduced);
    const Status reduced = channel.template await<mem::Order::kAcquire>(kKcclFlagReduced);
    if (reduced != kKcclOk) return reduced;

    for (int k = 1; k < world_size; ++k) {
        const int peer = (comm.rank + k) % world_size;
        const int error = mem::read_peer(context, peer, out + first[peer],
                                         peers[peer].out + first[peer] * sizeof(T),
                                         (first[peer + 1] - first[peer]) * sizeof(T));
        if (error != 0) {
            give_up_reading(comm, channel.awaited(), peer, error);
            return channel.leave(true);
        }
    }
    uint32_t left = 0;
    if (!nobody_gave_up(comm, &left)) return channel.leave(true);
    channel.template arrive<mem::Order::kRelease>(kKcclFlagPulled);
    return channel.template await<mem::Order::kAcquire>(kKcclFlagPulled);
}

namespace kernels {

template <class T, class Op>
KCCL_KERNEL void all_reduce_two_shot_cma_simple(KCCL_KERNEL_PARAM(KcclCall) parameter) {
    const KcclCall& call = platform::first_parameter(parameter);
    Channel<Block> channel(call, sizeof(T));
    kccl::all_reduce_two_shot_cma_simple<T, Op>(channel, output_of<T>(call), input_of<T>(call),
                                                call.count, operator_of<Op>(call));
}

}  // namespace kernels
}  // namespace kccl
