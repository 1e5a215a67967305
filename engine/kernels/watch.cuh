// Ends waits that take too long. Consumer warps do not read a clock: that code is long, and they
// would have to spill registers around it (bench/LOG.md). Instead, a warp that has polled many
// times records what it waits for, and checks whether it must give up. The producer warp
// (stream.cuh) checks the recorded waits against the clock. It has time for this while the ring of
// weights is full, as it is when the block waits. Where weights are staged in registers, there is
// no producer warp, and another warp does nothing but watch.
#pragma once

#include "columns.cuh"

namespace kccl::decode {

// Encodes a warp's wait as a word: the token step, and below it the ranks that it waits for, a bit
// each. The word 0 means that the warp does not wait.
KCCL_DECODE uint64_t wait_word(uint32_t ranks, uint32_t token_step) {
    return uint64_t{token_step} << 32 | ranks;
}

template <class S>
KCCL_DECODE uint64_t* wait_at(const DeviceComm& comm, const Task& task, uint32_t warp_index) {
    const uint64_t slot =
        Slots<S>::kWaits + platform::block_in_grid() * Slots<S>::kWaiters + warp_index;
    return reinterpret_cast<uint64_t*>(task.exchange_buffers[comm.rank] + slot * sizeof(Float4));
}

// Whether one thread of a warp, the scout, may poll alone at first (Waiter::await). A Laneformer
// whose weights have scales takes less time without scouts (bench/LOG.md). kScouts in columns.cuh
// decides by the columns.
template <class S>
constexpr bool kMayScout =
    S::kWeightsInRegisters || S::kNumResiduals == 1 || !kHasScales<typename Shape<S>::Qkv::Format>;

// Waits for float4s of the rank's exchange buffer, or for its host, on behalf of a warp. All
// threads of the warp make an object and call each function together.
template <class S>
class Waiter {
  public:
    KCCL_DECODE Waiter(const DeviceComm& comm, const Task& task, const mem::CopyBarrier* gave_up)
        : comm_(comm), task_(task), gave_up_(gave_up) {}

    // Tells whether a wait has failed.
    KCCL_DECODE bool has_failed() const { return has_failed_; }
    KCCL_DECODE void fail() { has_failed_ = true; }

    // Waits until the float4 at slots[i], for each i whose bit is set in `wanted`, has the tag
    // `tag` (exchange_buffer.cuh), or tag_at(tag, i). float4s[i] becomes this float4; the others
    // become zero. A thread may want none. ranks: the ranks that publish them, a bit each, for the
    // report of a failed wait. is_over(): tells whether nobody needs the float4s any more, which
    // ends the wait. Then all float4s become zero, as they do in a wait that fails and in all waits
    // after it. SCOUTS and may_scout: whether one thread polls alone at first.
    template <mem::Scope SCOPE, bool SCOUTS, int N, class Tag, class IsOver>
    KCCL_DECODE void await(const uint32_t (&slots)[N], uint32_t wanted, Tag tag,
                           uint32_t token_step, uint32_t ranks, Float4 (&float4s)[N],
                           IsOver is_over, bool may_scout = true) {
        static_assert(N <= 32, "a bit for each float4");
        mem::Packet packets[N];
        // Each packet is loaded before it is used, but under a condition. Without this assignment
        // the compiler assumes that its value comes from an earlier op. It keeps the registers of
        // all packets through the ops between, and spills others (bench/LOG.md). With weights in
        // registers the assignment might wait for loads of weights.
        if constexpr (!S::kWeightsInRegisters) {
            for (auto& packet : packets) packet = {};
        }
        const auto* const buffer =
            reinterpret_cast<const mem::Packet*>(task_.exchange_buffers[comm_.rank]);
        // A kernel without exchanges (to measure what they cost) polls once, and takes whatever it
        // finds. Its threads still end that turn of the loop together: they may wait for different
        // columns, but all of them for vectors, or all for control words.
        const bool takes_any =
            (S::kAblated & kKcclDecodeNoExchanges) != 0 && Slots<S>::is_vector(slots[0]);
        // With SCOUTS, if threads want several float4s, only the warp's first thread polls at
        // first, for its first float4. When that has come, all threads poll, which takes one more
        // trip to the L2 cache. But all blocks of the device wait at the same time, and more polls
        // would take the cache's bandwidth from the copies of weights and from each other.
        bool scouts = SCOUTS && kMayScout<S> && may_scout && N > 1 && !takes_any &&
                      platform::warp_any(leads(warp()) && (wanted & 1u) != 0);
        const auto has_one_come = [&] {
            bool has_come = false;
            if (leads(warp())) {
                has_come =
                    (without_tag(mem::load_packet<SCOPE>(buffer + slots[0]), tag_at(tag, 0)) &
                     1u) == 0;
            }
            return platform::warp_any(has_come);
        };
        // All packets are loaded before any is checked, so that their latencies overlap. Those that
        // have come are not loaded again: the others may take as long as the slowest block, and all
        // blocks poll then.
        uint32_t missing = wanted;
        const auto poll = [&] {
            if (scouts && !has_one_come()) return false;
            scouts = false;
            KCCL_UNROLL
            for (int i = 0; i < N; ++i) {
                if ((missing >> i & 1u) != 0)
                    packets[i] = mem::load_packet<SCOPE>(buffer + slots[i]);
            }
            uint32_t left = 0;
            KCCL_UNROLL
            for (int i = 0; i < N; ++i) {
                if ((missing >> i & 1u) != 0) {
                    left |= (without_tag(packets[i], tag_at(tag, i)) & 1u) << i;
                }
            }
            // Not where weights are in registers: a load into a register that may keep its number
            // would wait for all loads before it, those of weights too.
            if constexpr (!S::kWeightsInRegisters) missing = left;
            return left == 0;
        };
        uint32_t polls = 0;
        bool has_posted = false, is_here = !has_failed_;
        while (is_here && platform::warp_any(!poll()) && !takes_any) {
            if (is_over()) is_here = false;
            mem::poll_pause();
            if (++polls < comm_.polls_per_check) continue;
            polls = 0;
            has_posted = true;
            post(ranks, token_step);
            has_failed_ = platform::warp_any(mem::has_completed_now(gave_up_, 0));
            is_here = is_here && !has_failed_;
        }
        if (has_posted) post(0, token_step);
        KCCL_UNROLL
        for (int i = 0; i < N; ++i) {
            float4s[i] = is_here && (wanted >> i & 1u) != 0 ? float4_of(packets[i]) : Float4{};
        }
    }

    // Waits until is_there() returns true, or until the wait fails. is_there() reads host memory,
    // and must return the same value to all threads of the warp.
    template <class IsThere>
    KCCL_DECODE void await_host(uint32_t token_step, IsThere is_there) {
        uint32_t polls = 0;
        bool has_posted = false;
        while (!has_failed_ && !is_there()) {
            mem::poll_pause();
            if (++polls < comm_.polls_per_check) continue;
            polls = 0;
            has_posted = true;
            post(1u << comm_.rank, token_step);
            has_failed_ = platform::warp_any(mem::has_completed_now(gave_up_, 0));
        }
        if (has_posted) post(0, token_step);
    }

  private:
    // Records for Watch which ranks the warp waits for, a bit each. ranks = 0: the warp waits no
    // more.
    KCCL_DECODE void post(uint32_t ranks, uint32_t token_step) {
        if (!leads(warp())) return;
        const uint32_t index = mem::forget_index(platform::thread_in_block() / platform::kWarpSize);
        // The producer warp never calls this. So a warp behind the consumer warps is the collecting
        // warp (collect.cuh), whose number is S::kWarps.
        const uint32_t number = index < S::kWarps ? index : S::kWarps;
        uint64_t* const posted = wait_at<S>(comm_, task_, number);
        const uint64_t word = ranks == 0 ? 0 : wait_word(ranks, token_step);
        // A long wait calls this repeatedly with the same word. It is stored only once, because the
        // simulator counts each store as progress, and would never find that all threads are stuck.
        // The old word is loaded, because remembering it would cost a register.
        if (mem::load<mem::Order::kRelaxed, mem::Scope::kDevice>(posted) == word) return;
        mem::store<mem::Order::kRelaxed, mem::Scope::kDevice>(posted, word);
    }

    const DeviceComm& comm_;
    const Task& task_;
    const mem::CopyBarrier* const gave_up_;
    bool has_failed_ = false;
};

// Watches over the recorded waits of the block's warps. All threads of the watching warp make one
// object and call look() again and again.
template <class S>
class Watch {
  public:
    KCCL_DECODE Watch(const DeviceComm& comm, const Task& task, mem::CopyBarrier* gave_up)
        : comm_(comm), task_(task), gave_up_(gave_up) {}

    // In one of comm.polls_per_check calls, checks the block's recorded waits against the clock.
    // When one has taken too long, makes all waits of the block give up.
    KCCL_DECODE void look() {
        if (has_given_up_ || ++looks_ < comm_.polls_per_check) return;
        looks_ = 0;
        const uint32_t thread = warp().index();
        static_assert(Slots<S>::kWaiters <= platform::kWarpSize, "a thread for each warp");
        const uint64_t word = thread < Slots<S>::kWaiters
                                  ? mem::load<mem::Order::kRelaxed, mem::Scope::kDevice>(
                                        wait_at<S>(comm_, task_, thread))
                                  : 0;
        if (word != last_) patience_.clock.started_ns = 0;
        last_ = word;
        const auto ranks = static_cast<uint32_t>(word);
        auto seen = static_cast<uint32_t>(word >> 32);
        Awaited awaited = {kKcclEngineStep, static_cast<int32_t>(platform::block_in_grid()),
                           seen + 1};
        if (S::kSamples && word != 0 && task_.mask != 0) {
            // All blocks wait for block 0, and block 0 waits for the host to write a mask
            // (mask.cuh). So the mask is reported as missing, not a block.
            const auto* const mailbox = reinterpret_cast<const Mailbox*>(task_.mailbox);
            const uint32_t position =
                mem::load<mem::Order::kRelaxed, mem::Scope::kSystem>(&mailbox->awaited);
            const uint32_t masked =
                mem::load<mem::Order::kRelaxed, mem::Scope::kSystem>(&mailbox->masked);
            if (masked < position) {
                awaited.channel = kKcclEngineMask;
                awaited.wanted = position;
                seen = masked;
            }
        }
        if (warp_may_go_on(comm_, awaited, patience_, Missing{ranks, seen})) return;
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

// Calls Watch::look() until `ended` completes its first phase. Called by all threads of the warp.
template <class S>
KCCL_DECODE void watch_until(const DeviceComm& comm, const Task& task,
                             const mem::CopyBarrier* ended, mem::CopyBarrier* gave_up) {
    Watch<S> watch(comm, task, gave_up);
    while (platform::warp_any(!mem::has_completed_now(ended, 0))) {
        watch.look();
        mem::poll_pause();
    }
}

}  // namespace kccl::decode
