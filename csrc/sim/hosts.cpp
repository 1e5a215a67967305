// Runs a machine if each rank has a host thread (kccl.run_threads). This file decides which of
// these threads moves the machine, that is, runs its kernels, and when.
//
// What a machine does must depend on its seed only, not on the speed of the ranks' Python programs.
// So it moves only while every rank is in a launch, has left, or waits for other ranks outside of
// the machine. One of the threads that wait for their launches then moves the machine, until a
// launch ends and its rank's program goes on.
#include <time.h>

#include <algorithm>
#include <chrono>

#include "../include/kccl/targets/host_floats.h"
#include "faults.h"
#include "machine.h"

namespace kccl::sim {
namespace {

// A rank whose program is this long in no launch, and neither waits outside nor has left, is late:
// the machine moves without it.
constexpr uint64_t kLateNs = 3'000'000'000;
// How long a machine in which no thread can move waits before it tries again, as long as a rank's
// program could still free it, by its next launch for example. In this time the machine's clock
// goes on as the host's does.
constexpr uint64_t kLookNs = 2'000'000;
// The most time that one such wait adds to the machine's clock.
constexpr uint64_t kMostPassNs = 100'000'000;

// A waiting OS thread checks this often whether interrupt() was called.
constexpr uint64_t kInterruptNs = 200'000'000;

// Locked while a machine moves, because only one machine in the process may.
std::mutex moving;

uint64_t now_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000u + static_cast<uint64_t>(now.tv_nsec);
}

}  // namespace

// Tells whether the machine may move (run kernels) now. If ranks keep it from moving, stores in
// *wake_at_ns the time at which they will be late, so that it may move without them; otherwise
// stores 0.
bool Machine::may_move(uint64_t now, uint64_t* wake_at_ns) const {
    uint64_t latest = 0;
    for (const Rank& rank : ranks_) {
        if (rank.host == Rank::kRunning) latest = std::max(latest, rank.running_since_ns + kLateNs);
    }
    *wake_at_ns = latest;
    return latest <= now;
}

void Machine::move_for_hosts(std::unique_lock<std::mutex>& lock) {
    is_moved_ = true;
    const uint64_t began_ns = now_ns();
    const uint64_t changes_before = changes_;
    const Halt halt = [this] {
        const std::lock_guard<std::mutex> only(moving);
        const Faults faults;
        return move();
    }();
    is_moved_ = false;
    for (Rank& rank : ranks_) {
        const Stream& stream = rank.streams.front();
        if (rank.host != Rank::kInLaunch || !stream.launches.empty()) continue;
        // The rank's program goes on, and the machine waits for its next launch. If the program
        // itself writes to windows, as when it leaves, its writes come after all that its launches
        // did.
        join(memory.hosts, stream.known.ordered);
        rank.host = Rank::kRunning;
        rank.running_since_ns = now_ns();
    }
    if (halt == Halt::kStuck) {
        const bool can_be_freed = std::any_of(ranks_.begin(), ranks_.end(), [](const Rank& rank) {
            return rank.host == Rank::kRunning || rank.host == Rank::kOutside;
        });
        if (!can_be_freed && report_crossed()) {
            // report_crossed() has reported the mistake, which ends the run. Otherwise each of the
            // ranks would wait for the others until its timeout.
        } else if ((!has_pollers() && !can_be_freed) || has_unstarted()) {
            report_stuck(kKcclSimDeadlock);
        } else if (can_be_freed) {
            // With many simulated threads, move() takes longer than the wait below. If it changed
            // nothing, the machine was stuck during move() too, and its time counts.
            const uint64_t stuck_since_ns = changes_ == changes_before ? began_ns : now_ns();
            const uint64_t changes = changes_;
            changed_.wait_for(lock, std::chrono::nanoseconds(kLookNs));
            // If another host thread has moved the machine meanwhile and something changed, the
            // machine was not stuck, and no time counts. Threads of several ranks wait here at the
            // same time, and each counts only time that the others have not counted. A process that
            // was stopped for long, as by Ctrl-Z, was not stuck so long, so at most kMostPassNs
            // count.
            const uint64_t now = now_ns();
            const uint64_t since_ns = std::max(stuck_since_ns, passed_until_ns_);
            passed_until_ns_ = now;
            if (changes_ == changes) pass_time(std::min(now - since_ns, kMostPassNs));
        } else if (!pass_time(0)) {
            report_overdue();
        }
    }
    changed_.notify_all();
}

int Machine::launch_and_wait(const KcclSimLaunch& launch) {
    // Kernels need the default floating-point mode, and this thread may run those of all ranks.
    const host::DefaultFloats floats;
    std::unique_lock<std::mutex> lock(mutex);
    if (!findings.empty() || is_interrupted_) return 1;
    const std::shared_ptr<Grid> grid = enqueue(launch);
    Rank& rank = ranks_[static_cast<size_t>(launch.rank)];
    rank.host = Rank::kInLaunch;
    changed_.notify_all();
    while (!grid->has_ended && findings.empty() && !is_interrupted_) {
        uint64_t wake_at_ns = 0;
        const uint64_t now = now_ns();
        if (!is_moved_ && may_move(now, &wake_at_ns)) {
            move_for_hosts(lock);
        } else if (is_moved_ || wake_at_ns <= now) {
            // interrupt() does not lock the mutex, so it may notify just before this wait begins.
            // So the wait ends after kInterruptNs, and the loop checks again.
            changed_.wait_for(lock, std::chrono::nanoseconds(kInterruptNs));
        } else {
            changed_.wait_for(lock,
                              std::chrono::nanoseconds(std::min(wake_at_ns - now, kInterruptNs)));
        }
    }
    return grid->has_ended && findings.empty() ? 0 : 1;
}

void Machine::set_host(int index, Rank::HostState state) {
    const std::lock_guard<std::mutex> lock(mutex);
    Rank& rank = ranks_[static_cast<size_t>(index)];
    // Ranks that have met outside of the machine know all that each other's launches did before. A
    // rank gives its knowledge when it begins to wait outside, and takes all that was given when it
    // stops.
    Known& known = rank.streams.front().known;
    if (state == Rank::kOutside) join(met_outside_, known.ordered);
    if (rank.host == Rank::kOutside) {
        for (ClockRef* clock : {&known.ordered, &known.caused}) {
            join(*clock, met_outside_);
        }
    }
    rank.host = state;
    rank.running_since_ns = now_ns();
    changed_.notify_all();
}

}  // namespace kccl::sim
