// Waits that always end. Every poll loop of the library has one form:
//
//     const bool arrived = wait_until(comm, awaited, is_there, missing);
//
// is_there() polls once. missing() returns what this thread still waits for; it is called rarely.
//
// A wait fails when its timeout has passed, when a rank that it waits for is gone, when any peer
// gave up first, or when the user interrupted. Then the rank gives up: it writes one record, sets
// its abort word at all peers, and leaves a status in KcclState that stays until reset.
#pragma once

#include "description.cuh"
#include "together.cuh"

namespace kccl {

// Returns true if epoch `seen` is `wanted` or later. This holds across the wrap as long as the two
// are less than half a period apart, which scrub.cuh ensures.
KCCL_DEVICE bool has_reached(uint32_t seen, uint32_t wanted) {
    return static_cast<int32_t>(seen - wanted) >= 0;
}

KCCL_DEVICE Status status_of(const DeviceComm& comm) {
    return static_cast<Status>(
        mem::load<mem::Order::kRelaxed, mem::Scope::kDevice>(&state_of(comm)->status));
}

// Stores `departure` in this rank's abort word at `peer`, with release: a peer that acquires the
// word sees what this thread wrote before.
KCCL_DEVICE void depart(const DeviceComm& comm, int peer, KcclDeparture departure) {
    mem::store<mem::Order::kRelease, mem::Scope::kSystem>(abort_word(comm, peer, comm.rank),
                                                          static_cast<uint32_t>(departure));
}

// Fails this rank: stores `record` and tells every peer. Only the first failure of a rank counts.
// So one thread writes the records: the rank's own, which its host reads after the kernel, and one
// at each peer, which the abort word hands over.
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

// Fails this rank because `source` gave up, and stores the source's record as the cause. The source
// itself tells the others.
KCCL_DEVICE_COLD void follow(const DeviceComm& comm, int source) {
    State* state = state_of(comm);
    if (!mem::claim(&state->status, static_cast<uint32_t>(kKcclAborted))) return;
    state->record = mem::load_plain(abort_record(comm, comm.rank, source));
    mem::tell_host(state->idle_context, kKcclAborted, state->record);
}

// What a wait needs. kEach: words of all missing peers, so it fails when one of them is gone. kAny:
// a word of any missing peer, so it fails only when all of them are gone.
enum class Need { kEach, kAny };

// The purpose of a wait, as the record says it if the wait fails.
struct Awaited {
    uint32_t kernel;  // KcclKernel or KcclNoKernel
    int32_t channel;  // as KcclRecord.channel: the channel, or for the call wait() the signal_id
    uint32_t wanted;  // an epoch or a count
    Need need = Need::kEach;
    bool is_on_channel = false;  // wanted is the epoch of a call that this rank has described
};

// Fails this rank because `source` makes a different call. `mine` and `theirs` describe this rank's
// call and the source's call; they go into the record.
KCCL_DEVICE_COLD void refuse_call(const DeviceComm& comm, const Awaited& awaited, int source,
                                  const Description& mine, const Description& theirs) {
    constexpr uint64_t kMost = 0xffffffff;
    const auto most = [](uint64_t bytes) {
        return static_cast<uint32_t>(bytes < kMost ? bytes : kMost);
    };
    give_up(comm, Record{kKcclCallsDiffer, comm.rank, source, awaited.kernel, awaited.channel,
                         most(mine.num_bytes), most(theirs.num_bytes), mine.call, theirs.call});
}

// Compares this rank's description of the awaited call with those of the peers in `ranks`, a bit
// each. A peer that has not entered the call yet counts as equal. If a description differs, fails
// this rank and returns false. Used on CPUs only, for calls that are described (description.cuh).
KCCL_DEVICE_COLD bool make_same_call(const DeviceComm& comm, const Awaited& awaited,
                                     uint32_t ranks) {
    const int index = awaited.channel * comm.blocks_per_channel;
    const Description mine = described(comm, comm.rank, index, awaited.wanted);
    if (mine.call == kUnknownCall) return true;
    for (int source = 0; source < comm.world_size; ++source) {
        if ((ranks >> source & 1u) == 0) continue;
        const Description theirs = described(comm, source, index, awaited.wanted);
        if (theirs.call == kUnknownCall || are_same(mine, theirs)) continue;
        refuse_call(comm, awaited, source, mine, theirs);
        return false;
    }
    return true;
}

// The peers that a thread still waits for.
struct Missing {
    uint32_t ranks;      // a bit for each rank that is waited for, also if it is this rank itself
    uint32_t seen;       // the last value of a word of one of these ranks: an epoch or a count
    int32_t block = -1;  // in waits between blocks: the block whose word that is
};

// The most time between two reads of the clock that counts as waited, on a CPU. A waiting rank
// reads the clock far more often, unless it was stopped, as by Ctrl-Z, or its machine slept. In
// that case its peers have not had this time either.
constexpr uint64_t kMostBetweenLooksNs = 100000000;

// Notes that a waiting thread on a CPU has read the clock, which says `now`. Returns how long the
// wait has lasted, without the time in which the thread was stopped.
KCCL_DEVICE uint64_t waited_until(uint64_t now, uint64_t& started_ns, uint64_t& looked_ns) {
    if (started_ns == 0) {
        started_ns = now;
    } else if (now - looked_ns > kMostBetweenLooksNs) {
        started_ns += now - looked_ns - kMostBetweenLooksNs;
    }
    looked_ns = now;
    return now - started_ns;
}

// Measures how long a wait has lasted. started_ns: when this thread first read the clock in the
// wait; 0 before that. On a GPU no kernel is stopped, so this form needs no time of the last read,
// which would be one word more and make each wait slower.
template <bool IS_CPU>
struct WaitClock {
    uint64_t started_ns = 0;

    KCCL_DEVICE uint64_t waited(uint64_t now) {
        if (started_ns == 0) started_ns = now;
        return now - started_ns;
    }
};

template <>
struct WaitClock<true> {
    uint64_t started_ns = 0;
    uint64_t looked_ns = 0;  // when this thread last read the clock

    KCCL_DEVICE uint64_t waited(uint64_t now) { return waited_until(now, started_ns, looked_ns); }
};

// The state of one wait. Each thread keeps its own.
struct Patience {
    uint32_t looks = 0;  // how often the warp was on the slow path; one lane checks each time
    // The lost peers whose words were polled once more after the loss was seen, a bit each.
    uint32_t looked_again = 0;
    WaitClock<platform::kCpu> clock;
};

// On a GPU a wait checks only the clock and this rank's status in its first millisecond. Reading
// the host's mailbox takes microseconds, with many warps a millisecond, and would delay the peers
// that wait for this rank.
constexpr uint64_t kQuietNs = platform::kCpu ? 0 : 1000000;

// On CPUs a rank that has waited this long compares its call with those of the missing peers. If a
// peer is only late, that costs it one cache line, which it must fetch again.
constexpr uint64_t kCompareAfterNs = 10000000;

// Tells whether it is this thread's turn to check the clock. The waiting threads of a warp take
// turns. lanes: the waiting threads, a bit each. looks: see Patience.
KCCL_DEVICE bool has_turn(uint64_t lanes, uint32_t looks) {
    const uint64_t behind = lanes & (~uint64_t{0} << (looks % platform::kWarpSize));
    const uint64_t remaining = behind != 0 ? behind : lanes;
    return remaining != 0 && (remaining & (~remaining + 1)) == uint64_t{1} << warp().index();
}

// Returns the lowest rank of a set, which is not empty.
KCCL_DEVICE int first_of(uint32_t ranks) {
    int rank = 0;
    while ((ranks >> rank & 1u) == 0) ++rank;
    return rank;
}

// Reads the abort words. If a peer gave up, fails this rank and returns false. *closed gets a bit
// for each peer that has closed its communicator.
KCCL_DEVICE bool nobody_gave_up(const DeviceComm& comm, uint32_t* closed) {
    for (int source = 0; source < comm.world_size; ++source) {
        const uint32_t departure = mem::load<mem::Order::kAcquire, mem::Scope::kSystem>(
            abort_word(comm, comm.rank, source));
        if (departure == kKcclGaveUp) {
            follow(comm, source);
            return false;
        }
        if (departure == kKcclLeft) *closed |= 1u << source;
    }
    return true;
}

// Decides whether a wait may continue. Checks the status, the clock and the abort words; on a CPU
// also whether the processes of the missing peers are alive, on a GPU the host's mailbox. Returns
// false if the wait has failed; this rank has then given up.
KCCL_DEVICE_COLD bool may_go_on(const DeviceComm& comm, const Awaited& awaited, Patience& patience,
                                const Missing& missing) {
    State* state = state_of(comm);
    if (status_of(comm) != kKcclOk) return false;
    const uint64_t now = mem::clock_ns();
    const uint64_t waited_ns = patience.clock.waited(now);
    if (waited_ns < kQuietNs) return true;
    uint32_t closed = 0;
    if (!nobody_gave_up(comm, &closed)) return false;
    if (platform::kCpu && awaited.is_on_channel && waited_ns > kCompareAfterNs &&
        !make_same_call(comm, awaited, missing.ranks)) {
        return false;
    }
    uint32_t gone = 0;
    uint32_t status = mem::idle(state->idle_context, waited_ns, missing.ranks, &gone);
    const uint32_t lost = (closed | gone) & missing.ranks;
    const bool is_hopeless = awaited.need == Need::kEach ? lost != 0 : lost == missing.ranks;
    // A peer may have sent its word and then left. So after a peer is found gone, poll once more.
    const uint32_t last_words = is_hopeless ? lost & ~patience.looked_again : 0;
    if (status == kKcclOk && last_words != 0) {
        patience.looked_again |= last_words;
        return true;
    }
    int32_t culprit = awaited.need == Need::kAny ? -1 : first_of(missing.ranks);
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
    const int32_t channel = missing.block >= 0 ? missing.block : awaited.channel;
    give_up(comm, Record{status, comm.rank, culprit, awaited.kernel, channel, missing.seen,
                         awaited.wanted, 0, waited_ns});
    return false;
}

// Returns true if `mine` is true in any thread of the warp. `mine`: this thread has found that the
// communicator has failed. If it returns true, status_of() is not ok in any thread of the warp from
// here on. The sync behind the vote ensures that, because a vote alone orders no memory. Called by
// all threads of a warp.
KCCL_DEVICE bool has_failed_in_warp(bool mine) {
    if (!platform::warp_any(mine)) return false;
    platform::sync_warp();
    return true;
}

// Runs the slow path of a wait. Returns whether the warp may continue to poll. Called by all
// threads of a warp.
KCCL_DEVICE bool warp_may_go_on(const DeviceComm& comm, const Awaited& awaited, Patience& patience,
                                const Missing& missing) {
    const bool looks = has_turn(platform::warp_ballot(missing.ranks != 0), patience.looks++);
    return !has_failed_in_warp(looks && !may_go_on(comm, awaited, patience, missing));
}

// Polls until is_there() is true in all threads of the warp. Returns false if the wait failed; then
// status_of() is not ok in any of them. Called by all threads of a warp, with the same arguments.
//
// is_there() -> bool: polls once. Returns true if this thread has seen all that it waits for.
// missing() -> Missing: says, after a poll, what this thread has not seen. ranks is 0 if it has
// seen all.
//
// The slow path stands first because compilers keep source order. So the code after a successful
// poll follows the poll directly. The slow path works on copies because a variable whose address is
// taken lies in memory, and the hot loop must have registers only.
template <class IsThere, class WhatIsMissing>
KCCL_DEVICE bool wait_until(const DeviceComm& comm, Awaited awaited, IsThere is_there,
                            WhatIsMissing missing) {
    Patience patience;
    for (bool has_polled = false;; has_polled = true) {
        if (has_polled) {
            const Missing now = missing();
            const Awaited what = awaited;
            Patience spent = patience;
            if (!warp_may_go_on(comm, what, spent, now)) return false;
            patience = spent;
        }
        uint32_t polls = 0;
        do {
            // The threads vote, so that all threads of the warp leave the loop together.
            if (!platform::warp_any(!is_there())) return true;
            mem::poll_pause();
        } while (++polls < comm.polls_per_check);
    }
}

}  // namespace kccl
