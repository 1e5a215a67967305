// all_reduce, two_shot, cross-memory attach, simple protocol: for CPUs and messages longer than the
// caches. Rank r owns chunk r of the message; nothing is staged.
//
//     "staged"         where `in` and `out` lie in this process
//     reduce-scatter   chunk r of each peer's `in` --read_peer, piece by piece--> rows in its own
//                      staging --reduce with its own--> chunk r of `out`; "reduced"
//     all-gather       chunk p of each peer p's `out` --read_peer--> `out`; "pulled"
//
//     traffic in per rank: 2 * (world_size - 1) / world_size * n bytes, each byte moved once
//
// In place is safe: chunk r of rank r's buffer is overwritten by rank r only and read by the others
// only after "reduced"; the other chunks are overwritten after their owners have said so. The call
// ends with "pulled" of all, because then the caller may write its buffers. A rank that gives up
// hands its buffers back before that, but tells its peers first: so each looks at the abort words
// after its last read, and believes nothing that it read from a rank that gave up.
//
// Memory that no other process may read (some drivers' pinned memory) is found out by its own rank;
// then all ranks stage the message.
#pragma once

#include "../include/kccl/channel.cuh"
#include "../include/kccl/reduce.cuh"
#include "all_reduce_two_shot_pull_simple.cuh"

namespace kccl {

// What a rank tells its peers about a call.
struct Whereabouts {
    uint64_t in;
    uint64_t out;
    uint64_t is_readable;
};

// True when another process could read the array: this one tries its first and last bytes.
KCCL_DEVICE bool is_readable(const Call& call, uint64_t address, uint64_t num_bytes) {
    const uint64_t context = state_of(call.comm)->idle_context;
    uint8_t ends[2];
    return mem::read_peer(context, call.comm.rank, &ends[0], address, 1) &&
           mem::read_peer(context, call.comm.rank, &ends[1], address + num_bytes - 1, 1);
}

// Fails the call because a peer's memory could not be read: it gave up and freed it, or its process
// has ended.
KCCL_DEVICE_COLD Status give_up_reading(const Call& call, int peer, uint32_t epoch) {
    uint32_t left = 0;
    if (nobody_gave_up(call.comm, &left)) {
        give_up(call.comm, Record{kKcclPeerLost, call.comm.rank, peer, call.kernel, call.channel,
                                  epoch, epoch, 0, 0});
    }
    return status_of(call.comm);
}

// Contract as all_reduce_one_shot_ll16, for a coop of one thread: a CPU's block. Every rank's
// process may read every other's (the planner knows).
template <class T, class Op, class Coop>
KCCL_DEVICE Status all_reduce_two_shot_cma_simple(Coop coop, const Call& call) {
    const DeviceComm& comm = call.comm;
    const int world_size = comm.world_size;
    const uint64_t context = state_of(comm)->idle_context;
    const T* in = reinterpret_cast<const T*>(call.input);
    T* out = reinterpret_cast<T*>(call.output);
    const uint64_t line = kKcclLineBytes / sizeof(T);
    const uint64_t chunk = (call.count + world_size * line - 1) / (world_size * line) * line;
    uint64_t first[kKcclMaxWorldSize + 1];
    for (int rank = 0; rank <= world_size; ++rank) {
        first[rank] = rank * chunk < call.count ? rank * chunk : call.count;
    }

    Channel channel(call);
    const Status entered = channel.next(coop, Exchange::kPairwise);
    if (entered != kKcclOk) return entered;
    const uint32_t epoch = channel.epoch();
    mem::store_plain(
        staging_slot<Whereabouts>(comm, comm.rank, call.channel, channel.parity(), Half::kInput),
        Whereabouts{call.input, call.output,
                    is_readable(call, call.input, call.count * sizeof(T)) &&
                        is_readable(call, call.output, call.count * sizeof(T))});
    arrive<mem::Order::kRelease>(coop, call, kKcclFlagStaged, epoch);
    const Status staged = await<mem::Order::kAcquire>(coop, call, kKcclFlagStaged, epoch);
    if (staged != kKcclOk) return staged;
    Whereabouts peers[kKcclMaxWorldSize];
    bool all_readable = true;
    for (int peer = 0; peer < world_size; ++peer) {
        peers[peer] = mem::load_plain(
            staging_slot<Whereabouts>(comm, peer, call.channel, channel.parity(), Half::kInput));
        all_readable = all_readable && peers[peer].is_readable != 0;
    }
    if (!all_readable) return all_reduce_two_shot_pull_simple<T, Op>(coop, call);

    // The rows of one piece share this rank's result staging, which no peer reads in this call.
    T* rows = staging_slot<T>(comm, comm.rank, call.channel, channel.parity(), Half::kResult);
    const uint64_t piece = comm.layout.staging_bytes / world_size / kKcclLineBytes * line;
    for (uint64_t begin = first[comm.rank]; begin < first[comm.rank + 1]; begin += piece) {
        const uint64_t rest = first[comm.rank + 1] - begin;
        const uint64_t count = rest < piece ? rest : piece;
        const T* inputs[kKcclMaxWorldSize];
        for (int peer = 0; peer < world_size; ++peer) {
            inputs[peer] = peer == comm.rank ? in + begin : rows + peer * piece;
            if (peer == comm.rank) continue;
            if (!mem::read_peer(context, peer, rows + peer * piece,
                                peers[peer].in + begin * sizeof(T), count * sizeof(T))) {
                return give_up_reading(call, peer, epoch);
            }
        }
        reduce_rows<T, Op>(coop, out + begin, inputs, world_size, count);
    }
    arrive<mem::Order::kRelease>(coop, call, kKcclFlagReduced, epoch);
    const Status reduced = await<mem::Order::kAcquire>(coop, call, kKcclFlagReduced, epoch);
    if (reduced != kKcclOk) return reduced;

    for (int k = 1; k < world_size; ++k) {
        const int peer = (comm.rank + k) % world_size;
        if (!mem::read_peer(context, peer, out + first[peer],
                            peers[peer].out + first[peer] * sizeof(T),
                            (first[peer + 1] - first[peer]) * sizeof(T))) {
            return give_up_reading(call, peer, epoch);
        }
    }
    uint32_t left = 0;
    if (!nobody_gave_up(comm, &left)) return status_of(comm);
    arrive<mem::Order::kRelease>(coop, call, kKcclFlagPulled, epoch);
    return await<mem::Order::kAcquire>(coop, call, kKcclFlagPulled, epoch);
}

namespace kernels {

template <class T, class Op>
KCCL_KERNEL void all_reduce_two_shot_cma_simple(KCCL_KERNEL_PARAM(KcclCall) call) {
    kccl::all_reduce_two_shot_cma_simple<T, Op>(block(), call);
}

}  // namespace kernels
}  // namespace kccl
