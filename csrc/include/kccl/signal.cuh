// Waits that end, and the words that end them.
//
// Every poll loop of the library has one form:
//
//     Wait wait(call, wanted);
//     do { poll; } while (wait.again(missing, seen));
//     if (wait.failed()) ...
//
// again() returns false when nothing is missing, or when the wait failed: the limit passed, a peer
// that is missing is gone, any peer gave up first, or the interpreter was interrupted. A failed
// wait writes one record, raises the abort word at all peers and leaves a status in KcclState that
// stays until reset.
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

// Tells `peer` how this rank departs, after everything written before.
KCCL_DEVICE void depart(const DeviceComm& comm, int peer, KcclDeparture departure) {
    mem::store<mem::Order::kRelease, mem::Scope::kSystem>(abort_word(comm, peer, comm.rank),
                                                          static_cast<uint32_t>(departure));
}

// Fails this rank: keeps `record`, tells every peer. Only the first failure of a rank is kept, so
// one thread writes the records; the rank's own is for its host, after the kernel, and a peer's lies
// behind the abort word.
KCCL_DEVICE_COLD void give_up(const DeviceComm& comm, const Record& record) {
    State* state = state_of(comm);
    if (!mem::claim(&state->status, record.status)) return;
    state->record = record;
    for (int peer = 0; peer < comm.world_size; ++peer) {
        if (peer == comm.rank) continue;
        mem::store_plain(abort_record(comm, peer, comm.rank), record);
        depart(comm, peer, kKcclGaveUp);
    }
    mem::tell_host(state->idle_context, record.status, record);
}

// Fails this rank because `source` gave up: keeps the record of the cause. The source tells the
// others.
KCCL_DEVICE_COLD void follow(const DeviceComm& comm, int source) {
    State* state = state_of(comm);
    if (!mem::claim(&state->status, static_cast<uint32_t>(kKcclAborted))) return;
    state->record = mem::load_plain(abort_record(comm, comm.rank, source));
    mem::tell_host(state->idle_context, kKcclAborted, state->record);
}

// Whom a wait needs: each of the missing peers, or any one of them.
enum class Need { kEach, kAny };

// What a wait is for, as its record will name it, and what it remembers between two looks at the
// clock.
struct Patience {
    uint32_t kernel;
    int32_t channel;
    uint32_t wanted;
    Need need;
    uint32_t polls = 0;
    uint32_t looked_again = 0;  // lost peers, as bits, whose last words were looked for once more
    uint64_t started_ns = 0;
};

// The rank of the lowest bit of a set of ranks, which is not empty.
KCCL_DEVICE int first_of(uint32_t ranks) {
    int rank = 0;
    while ((ranks >> rank & 1u) == 0) ++rank;
    return rank;
}

// Looks at the abort words. False: a peer gave up, and this rank with it. *left: the peers, as
// bits, that have closed their communicators.
KCCL_DEVICE bool nobody_gave_up(const DeviceComm& comm, uint32_t* left) {
    for (int source = 0; source < comm.world_size; ++source) {
        const uint32_t departure = mem::load<mem::Order::kAcquire, mem::Scope::kSystem>(
            abort_word(comm, comm.rank, source));
        if (departure == kKcclGaveUp) {
            follow(comm, source);
            return false;
        }
        if (departure == kKcclLeft) *left |= 1u << source;
    }
    return true;
}

// Looks at the clock, at the abort words and, on a CPU, at the processes of the peers in `missing`,
// a set of ranks as bits. False: the wait failed. `seen` goes into the record.
KCCL_DEVICE_COLD bool may_go_on(const DeviceComm& comm, Patience& patience, uint32_t missing,
                                uint32_t seen) {
    State* state = state_of(comm);
    if (status_of(comm) != kKcclOk) return false;
    const uint64_t now = mem::clock_ns();
    if (patience.started_ns == 0) patience.started_ns = now;
    const uint64_t waited_ns = now - patience.started_ns;
    uint32_t left = 0;
    if (!nobody_gave_up(comm, &left)) return false;
    uint32_t gone = 0;
    uint32_t status = mem::idle(state->idle_context, waited_ns, missing, &gone);
    const uint32_t lost = (left | gone) & missing;
    const bool is_hopeless = patience.need == Need::kEach ? lost != 0 : lost == missing;
    // A peer may have sent its word and then left: the last words of each are looked for once more.
    const uint32_t last_words = is_hopeless ? lost & ~patience.looked_again : 0;
    if (status == kKcclOk && last_words != 0) {
        patience.looked_again |= last_words;
        return true;
    }
    int32_t culprit = patience.need == Need::kAny ? -1 : first_of(missing);
    if (status == kKcclInterrupted) {
        culprit = comm.rank;
    } else if (is_hopeless) {
        culprit = first_of(lost);
        status = (gone >> culprit & 1u) != 0 ? kKcclPeerLost : kKcclPeerLeft;
    } else {
        const bool contacted =
            mem::load<mem::Order::kRelaxed, mem::Scope::kDevice>(&state->contacted) != 0;
        const uint64_t limit_ns = mem::load<mem::Order::kRelaxed, mem::Scope::kSystem>(
            contacted ? &state->limit_ns : &state->first_limit_ns);
        if (waited_ns <= limit_ns) return true;
        status = kKcclTimeout;
    }
    give_up(comm, Record{status, comm.rank, culprit, patience.kernel, patience.channel, seen,
                         patience.wanted, 0, waited_ns});
    return false;
}

class Wait {
  public:
    // `call` and `wanted`, an epoch or a count, are what the record will name.
    KCCL_DEVICE Wait(const Call& call, uint32_t wanted, Need need = Need::kEach)
        : comm_(call.comm), patience_{call.kernel, call.channel, wanted, need} {}

    // The same outside of a call. `channel`: what the record will have under this name.
    KCCL_DEVICE Wait(const DeviceComm& comm, KcclKernel kernel, int32_t channel, uint32_t wanted)
        : comm_(comm), patience_{static_cast<uint32_t>(kernel), channel, wanted, Need::kEach} {}

    // To be called after each poll by all threads of a warp, so that the loop stays warp-uniform.
    // `missing`: the ranks, as bits, of which this thread has not seen all it waits for; one of
    // their words last read `seen`. This rank itself: other threads of it.
    KCCL_DEVICE bool again(uint32_t missing, uint32_t seen) {
        if (!platform::warp_any(missing != 0)) return false;
        mem::poll_pause();
        if (++patience_.polls < comm_.polls_per_check) return true;
        patience_.polls = 0;
        failed_ = platform::warp_any(missing != 0 && !may_go_on(comm_, patience_, missing, seen));
        return !failed_;
    }

    // The same for a wait whose record names in `channel` what this thread misses now.
    KCCL_DEVICE bool again(uint32_t missing, uint32_t seen, int32_t channel) {
        patience_.channel = channel;
        return again(missing, seen);
    }

    KCCL_DEVICE bool failed() const { return failed_; }

  private:
    const DeviceComm& comm_;
    Patience patience_;
    bool failed_ = false;
};

}  // namespace kccl
