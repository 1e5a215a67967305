// How waits end although the warps that multiply have no clock. Around the slow path of a wait,
// which is long, they would keep their registers in memory (bench/LOG.md). So a warp that has
// polled often in vain writes down what it waits for, and looks whether it is to give up. The warp
// that copies the weights watches: it has time when the ring is full, as it is when the block
// waits. Where weights are staged in registers, the warp that watches does nothing else.
#pragma once

#include "board.cuh"

namespace kccl::decode {

// What a warp waits for, as a word: which ranks, and the round. 0: it does not wait.
KCCL_DEVICE uint64_t wait_word(uint32_t ranks, uint32_t round) {
    return uint64_t{round} << 32 | ranks;
}

template <class S>
KCCL_DEVICE uint64_t* wait_at(const DeviceComm& comm, const Task& task, uint32_t warp_index) {
    const uint64_t place =
        Places<S>::kWaits + platform::block_in_grid() * Places<S>::kWaiters + warp_index;
    return reinterpret_cast<uint64_t*>(task.boards[comm.rank] + place * sizeof(Quad));
}

// How a warp waits for quads of its rank's board. All its threads make one and call all functions.
template <class S>
class Waiter {
  public:
    KCCL_DEVICE Waiter(const DeviceComm& comm, const Task& task, const mem::CopyBarrier* gave_up)
        : comm_(comm), task_(task), gave_up_(gave_up) {}

    // Whether a wait has failed.
    KCCL_DEVICE bool has_failed() const { return has_failed_; }
    KCCL_DEVICE void fail() { has_failed_ = true; }

    // Waits for the quads at places[i], where `wanted` has bit i. ranks: which ones publish them, a
    // bit each. A thread may want none. is_over(): whether nobody needs them any more; then, as
    // after a failed wait, the quads are zero. So are those of all later waits after a failed one.
    template <mem::Scope SCOPE, int N, class IsOver>
    KCCL_DEVICE void await(const uint32_t (&places)[N], uint32_t wanted, uint32_t tag,
                           uint32_t round, uint32_t ranks, Quad (&quads)[N], IsOver is_over) {
        static_assert(N <= 32, "a bit for each quad");
        mem::Packet packets[N];
        const auto* const board = reinterpret_cast<const mem::Packet*>(task_.boards[comm_.rank]);
        // Rounds end together all the same.
        const bool takes_any =
            (S::kAblated & kKcclDecodeNoExchanges) != 0 && places[0] < Places<S>::kEnds;
        // Where threads want several, the warp's first thread polls for its first one alone until
        // that comes. All blocks of the device wait at the same time, and their polls take the L2
        // cache's bandwidth from the copies of weights and from each other.
        bool scouts =
            N > 1 && !takes_any && platform::warp_any(leads(warp()) && (wanted & 1u) != 0);
        const auto has_one_come = [&] {
            bool has_come = false;
            if (leads(warp())) {
                has_come = (without_tag(mem::load_packet<SCOPE>(board + places[0]), tag) & 1u) == 0;
            }
            return platform::warp_any(has_come);
        };
        // All are loaded before any is checked, so that their latencies overlap.
        const auto poll = [&] {
            if (scouts && !has_one_come()) return false;
            scouts = false;
            KCCL_UNROLL
            for (int i = 0; i < N; ++i) {
                if ((wanted >> i & 1u) != 0)
                    packets[i] = mem::load_packet<SCOPE>(board + places[i]);
            }
            uint32_t wrong = 0;
            KCCL_UNROLL
            for (int i = 0; i < N; ++i) {
                if ((wanted >> i & 1u) != 0) wrong |= without_tag(packets[i], tag);
            }
            return (wrong & 1u) == 0;
        };
        uint32_t polls = 0;
        bool is_noted = false, is_here = !has_failed_;
        while (is_here && platform::warp_any(!poll()) && !takes_any) {
            if (is_over()) is_here = false;
            mem::poll_pause();
            if (++polls < comm_.polls_per_check) continue;
            polls = 0;
            is_noted = true;
            note(ranks, round);
            has_failed_ = platform::warp_any(mem::has_completed_now(gave_up_, 0));
            is_here = is_here && !has_failed_;
        }
        if (is_noted) note(0, round);
        KCCL_UNROLL
        for (int i = 0; i < N; ++i) {
            quads[i] = is_here && (wanted >> i & 1u) != 0 ? quad_of(packets[i]) : Quad{};
        }
    }

  private:
    // Writes down what the warp waits for; 0: nothing any more.
    KCCL_DEVICE void note(uint32_t ranks, uint32_t round) {
        if (!leads(warp())) return;
        const uint32_t index = mem::forget_index(platform::thread_in_block() / platform::kWarpSize);
        // The warp that copies does not wait.
        const uint32_t number = index < S::kWarps ? index : S::kWarps;
        uint64_t* const noted = wait_at<S>(comm_, task_, number);
        const uint64_t word = ranks == 0 ? 0 : wait_word(ranks, round);
        // A long wait calls this again and again with the same word, which is stored only once: the
        // simulator counts each store as progress, and would never find that all threads are stuck.
        // It loads the word, because a flag for this would cost registers.
        if (mem::load<mem::Order::kRelaxed, mem::Scope::kDevice>(noted) == word) return;
        mem::store<mem::Order::kRelaxed, mem::Scope::kDevice>(noted, word);
    }

    const DeviceComm& comm_;
    const Task& task_;
    const mem::CopyBarrier* const gave_up_;
    bool has_failed_ = false;
};

// All threads of the warp that watches make one and call look() again and again.
template <class S>
class Watch {
  public:
    KCCL_DEVICE Watch(const DeviceComm& comm, const Task& task, mem::CopyBarrier* gave_up)
        : comm_(comm), task_(task), gave_up_(gave_up) {}

    // Now and then checks on the block's waits. When one has failed, all of them are to give up.
    KCCL_DEVICE void look() {
        if (has_given_up_ || ++looks_ < comm_.polls_per_check) return;
        looks_ = 0;
        const uint32_t thread = warp().index();
        static_assert(Places<S>::kWaiters <= platform::kWarpSize, "a thread for each warp");
        const uint64_t word = thread < Places<S>::kWaiters
                                  ? mem::load<mem::Order::kRelaxed, mem::Scope::kDevice>(
                                        wait_at<S>(comm_, task_, thread))
                                  : 0;
        if (word != last_) patience_.started_ns = 0;
        last_ = word;
        const auto ranks = static_cast<uint32_t>(word), round = static_cast<uint32_t>(word >> 32);
        const Awaited awaited = {kKcclEngineStep, static_cast<int32_t>(platform::block_in_grid()),
                                 round + 1};
        if (warp_may_go_on(comm_, awaited, patience_, Missing{ranks, round})) return;
        has_given_up_ = true;
        if (leads(warp())) mem::arrive(gave_up_);
    }

  private:
    const DeviceComm& comm_;
    const Task& task_;
    mem::CopyBarrier* const gave_up_;
    Patience patience_;
    uint64_t last_ = 0;
    uint32_t looks_ = 0;
    bool has_given_up_ = false;
};

// Watches until `ended` completes its first phase. Called by all threads of the warp.
template <class S>
KCCL_DEVICE void watch_until(const DeviceComm& comm, const Task& task,
                             const mem::CopyBarrier* ended, mem::CopyBarrier* gave_up) {
    Watch<S> watch(comm, task, gave_up);
    while (platform::warp_any(!mem::has_completed_now(ended, 0))) {
        watch.look();
        mem::poll_pause();
    }
}

}  // namespace kccl::decode
