// Checks on CPUs that the ranks have made the same call, for calls that do not wait for all peers.
// Each rank describes its call (description.cuh) in the cache line of its credit, and in the next
// call its peers compare.
#pragma once

#include "wait.cuh"

namespace kccl {

// Describes this call in the line of a flag at all ranks. arrive() then sets the flag with release.
// Called by all threads of the coop (a thread, warp or block: coop.cuh).
template <class Coop>
KCCL_DEVICE void describe_to_peers(Coop coop, const DeviceComm& comm, int index, KcclFlag flag,
                                   const Description& mine) {
    for (int peer = coop.index(); peer < comm.world_size; peer += coop.size()) {
        // On a CPU describe() has already written this rank's own line.
        if (platform::kCpu && flag == kKcclFlagWritten && peer == comm.rank) continue;
        mem::store_plain(description_slot(comm, peer, index, flag, comm.rank, mine.epoch), mine);
    }
}

// Compares this rank's call, for which all credits have arrived, with the calls that the peers have
// described. If one differs, fails this rank and returns its status.
KCCL_DEVICE Status compare_credited(const DeviceComm& comm, int index, const Awaited& credit) {
    const Description mine = described(comm, comm.rank, index, credit.wanted);
    if (mine.call == kUnknownCall) return kKcclOk;
    for (int source = 0; source < comm.world_size; ++source) {
        const Description theirs = mem::load_plain(
            description_slot(comm, comm.rank, index, kKcclFlagCredit, source, credit.wanted));
        if (theirs.epoch != credit.wanted || are_same(mine, theirs)) continue;
        refuse_call(comm, credit, source, mine, theirs);
        return status_of(comm);
    }
    return kKcclOk;
}

}  // namespace kccl
