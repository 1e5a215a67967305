// Waits that end, and the words that end them.
//
// Every poll loop of the library has one form:
//
//     Wait wait(call, wanted);
//     do { poll; } while (wait.again(missing, peer, seen));
//     if (wait.failed()) ...
//
// again() returns false when nothing is missing, or when the wait failed: the limit passed, the
// peer's process is gone, a peer gave up first, or the interpreter was interrupted. A failed wait
// writes one record, raises the abort word at all peers and leaves a status in KcclState that stays
// until reset.
#pragma once

#include "coop.cuh"
#include "window.cuh"

namespace kccl {

// True when epoch `seen` is `wanted` or later. Holds across the wrap as long as the two are less
// than half a period apart, which the scrub in channel.cuh sees to.
KCCL_DEVICE bool has_reached(uint32_t seen, uint32_t wanted) {
    return static_cast<int32_t>(seen - wanted) >= 0;
}

KCCL_DEVICE Status status_of(const DeviceComm& comm) {
    return static_cast<Status>(
        mem::load<mem::Order::kRelaxed, mem::Scope::kDevice>(&state_of(comm)->status));
}

// Fails this rank: keeps `record`, tells every peer. Only the first failure of a rank is kept.
KCCL_DEVICE_COLD void give_up(const DeviceComm& comm, const Record& record) {
    State* state = state_of(comm);
    if (!mem::claim(&state->status, record.status)) return;
    state->record = record;
    for (int peer = 0; peer < comm.world_size; ++peer) {
        if (peer == comm.rank) continue;
        mem::store_plain(abort_record(comm, peer, comm.rank), record);
        mem::store<mem::Order::kRelease, mem::Scope::kSystem>(abort_word(comm, peer, comm.rank),
                                                              1u);
    }
}

// Fails this rank because `source` gave up: keeps the record of the cause. The source tells the
// others.
KCCL_DEVICE_COLD void follow(const DeviceComm& comm, int source) {
    State* state = state_of(comm);
    if (!mem::claim(&state->status, static_cast<uint32_t>(kKcclAborted))) return;
    state->record = mem::load_plain(abort_record(comm, comm.rank, source));
}

// What a wait remembers between two looks at the clock.
struct Patience {
    uint32_t polls = 0;
    bool peer_was_lost = false;
    uint64_t started_ns = 0;
};

// Looks at the clock, at the abort words and, on a CPU, at the peer's process. False: the wait
// failed.
KCCL_DEVICE_COLD bool may_go_on(const Call& call, Patience& patience, uint32_t wanted, int peer,
                                uint32_t seen) {
    const DeviceComm& comm = call.comm;
    State* state = state_of(comm);
    if (status_of(comm) != kKcclOk) return false;
    const uint64_t now = mem::clock_ns();
    if (patience.started_ns == 0) patience.started_ns = now;
    const uint64_t waited_ns = now - patience.started_ns;
    for (int source = 0; source < comm.world_size; ++source) {
        const uint32_t gave_up = mem::load<mem::Order::kAcquire, mem::Scope::kSystem>(
            abort_word(comm, comm.rank, source));
        if (gave_up != 0) {
            follow(comm, source);
            return false;
        }
    }
    const uint64_t limit_ns = mem::load<mem::Order::kRelaxed, mem::Scope::kSystem>(
        state->contacted != 0 ? &state->limit_ns : &state->first_limit_ns);
    uint32_t status = waited_ns > limit_ns ? kKcclTimeout : kKcclOk;
    int32_t culprit = peer;
    if (status == kKcclOk) status = mem::idle(state->idle_context, waited_ns, &culprit);
    // A peer may have sent its word and then left: its last words are looked for once more.
    if (status == kKcclPeerLost && !patience.peer_was_lost) {
        patience.peer_was_lost = true;
        return true;
    }
    if (status == kKcclOk) return true;
    give_up(comm, Record{status, comm.rank, culprit, call.kernel, call.channel, seen, wanted, 0,
                         waited_ns});
    return false;
}

class Wait {
  public:
    // `call` and `wanted` are what the record will name.
    KCCL_DEVICE Wait(const Call& call, uint32_t wanted) : call_(call), wanted_(wanted) {}

    // To be called after each poll by all threads of a warp, so that the loop stays warp-uniform.
    // `missing`: this thread has not seen all it waits for, namely a word of `peer` (-1: any peer)
    // that last read `seen`.
    KCCL_DEVICE bool again(bool missing, int peer, uint32_t seen) {
        if (!platform::warp_any(missing)) return false;
        mem::poll_pause();
        if (++patience_.polls < call_.comm.polls_per_check) return true;
        patience_.polls = 0;
        failed_ = platform::warp_any(missing && !may_go_on(call_, patience_, wanted_, peer, seen));
        return !failed_;
    }

    KCCL_DEVICE bool failed() const { return failed_; }

  private:
    const Call& call_;
    uint32_t wanted_;
    Patience patience_;
    bool failed_ = false;
};

}  // namespace kccl
