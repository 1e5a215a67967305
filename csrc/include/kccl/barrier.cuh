// Flag words: a rank stores the epoch of its call (the call's number on its channel) in such a word
// at a peer, to tell it that it has reached a point of the call (KcclFlag). A barrier is arrive()
// and then await(). The simple protocols store data before arrive() and read the peers' data after
// await().
#pragma once

#include "wait.cuh"

namespace kccl {

// Tells every rank, this one too, that this rank has reached `flag` in call `epoch` on scratch
// channel `index` (Channel::index()). Called by all threads of the coop (a thread, warp or block:
// coop.cuh). kRelease: what the coop's threads wrote before is visible to every coop that awaits
// this epoch with kAcquire. kRelaxed orders nothing.
template <mem::Order order, class Coop>
KCCL_DEVICE void arrive(Coop coop, const DeviceComm& comm, int index, KcclFlag flag,
                        uint32_t epoch) {
    if constexpr (order == mem::Order::kRelease) coop.sync();
    for (int peer = coop.index(); peer < comm.world_size; peer += coop.size()) {
        mem::store<order, mem::Scope::kSystem>(flag_word(comm, peer, index, flag, comm.rank),
                                               epoch);
    }
}

// Waits until the ranks [first, last) have reached `flag` of scratch channel `index` in the call
// whose epoch is awaited, or in a later one. Called by all threads of the coop, which all get the
// same status. It is also a sync of the coop. kAcquire: see arrive().
template <mem::Order order, class Coop>
KCCL_DEVICE Status await(Coop coop, const DeviceComm& comm, int index, KcclFlag flag,
                         Awaited awaited, int first, int last) {
    bool arrived = true;
    // In each turn a thread waits for one word. A coop with a thread for each rank needs one turn.
    for (int turn = first; turn < last && arrived; turn += coop.size()) {
        const int source = turn + static_cast<int>(coop.index());
        const bool is_mine = source < last;
        const uint32_t* word = flag_word(comm, comm.rank, index, flag, is_mine ? source : first);
        uint32_t seen = awaited.wanted;
        const auto poll = [&] {
            if (is_mine) seen = mem::load<order, mem::Scope::kSystem>(word);
            return has_reached(seen, awaited.wanted);
        };
        const auto missing = [&] {
            return Missing{has_reached(seen, awaited.wanted) ? 0 : 1u << source, seen};
        };
        arrived = wait_until(comm, awaited, poll, missing);
    }
    return coop.any(!arrived) ? status_of(comm) : kKcclOk;
}

}  // namespace kccl
