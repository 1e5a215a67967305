// The warps of a block that reads a prompt: a crew that computes, and a lookout that waits for
// other blocks and copies vectors from the board.
//
// Blocks hand vectors over by steps (prefill_shape.cuh). A block writes its rows with plain stores;
// its warps meet; one thread makes a fence and writes down the step's number. The lookout of a
// block that needs the rows polls for the number, makes a fence, and lets its crew go on. Numbers
// only grow.
//
// No place has two turns. Who writes one again has waited for a later step of all who read it: of
// its group, or, for messages, of all blocks at the end of the pass.
#pragma once

#include "delays.cuh"
#include "prefill_shape.cuh"
#include "product.cuh"

namespace kccl::decode {

// The positions of a pass.
struct Pass {
    uint32_t number;  // of all passes of all requests
    uint32_t first;
    uint32_t num;
};

template <class S>
constexpr mem::Scope kReach = S::kWorldSize == 1 ? mem::Scope::kDevice : mem::Scope::kSystem;

// What the lookout and the crew have in common.
template <class S>
class Member {
  public:
    using Dims = Shape<S>;

    KCCL_DEVICE Member(const DeviceComm& comm, const Task& task, PrefillShared<S>& shared)
        : comm_(comm), task_(task), shared_(shared) {}

    KCCL_DEVICE const DeviceComm& comm() const { return comm_; }
    KCCL_DEVICE const Task& task() const { return task_; }
    KCCL_DEVICE PrefillShared<S>& shared() const { return shared_; }
    KCCL_DEVICE uint32_t block() const { return platform::block_in_grid(); }
    KCCL_DEVICE uint32_t group() const { return Dims::group_of(block()); }
    KCCL_DEVICE uint32_t member() const { return Dims::member_of(block()); }
    // The group's first lane, of this rank's and of all.
    KCCL_DEVICE uint32_t first_lane_here() const { return group() * Dims::kGroupLanes; }
    KCCL_DEVICE uint32_t first_lane() const {
        return Dims::first_lane_of(comm_.rank) + first_lane_here();
    }
    KCCL_DEVICE Quad* on_board(int rank, uint32_t place) const {
        return reinterpret_cast<Quad*>(task_.boards[rank]) + place;
    }
    KCCL_DEVICE Quad* here(uint32_t place) const { return on_board(comm_.rank, place); }
    KCCL_DEVICE uint32_t* done(int rank, uint32_t of_rank, uint32_t of_block) const {
        return reinterpret_cast<uint32_t*>(on_board(rank, Chunk<S>::kDone)) + of_rank * S::kBlocks +
               of_block;
    }

    KCCL_DEVICE uint32_t* given_up(int rank, uint32_t pass, uint32_t of_rank) const {
        return reinterpret_cast<uint32_t*>(on_board(rank, Chunk<S>::kGivenUp)) +
               (pass & 1u) * S::kWorldSize + of_rank;
    }

  private:
    const DeviceComm& comm_;
    const Task& task_;
    PrefillShared<S>& shared_;
};

// A warp that computes.
template <class S>
class Crew : public Member<S> {
  public:
    static constexpr uint32_t kThreads = S::kChunkWarps * platform::kWarpSize;

    KCCL_DEVICE Crew(const DeviceComm& comm, const Task& task, PrefillShared<S>& shared)
        : Member<S>(comm, task, shared),
          vectors_(shared.ring, comm),
          meeting_(shared.met),
          delays_(comm.rank) {}

    KCCL_DEVICE uint32_t warp_index() const {
        return mem::forget(platform::thread_in_block() / platform::kWarpSize);
    }
    // Among the threads of the crew.
    KCCL_DEVICE uint32_t index() const { return mem::forget(platform::thread_in_block()); }
    KCCL_DEVICE Consumer<VectorRing<S>>& vectors() { return vectors_; }

    // All warps of the crew wait for each other.
    KCCL_DEVICE void meet() { (void)meeting_.meet(false); }

    // Waits until the lookout has seen what comes next. False: it will not come.
    KCCL_DEVICE bool is_ready() {
        const uint32_t phase = ready_parity_;
        await(&this->shared().ready, &ready_parity_);
        return mem::load_plain(&this->shared().stops[phase]) == kNoStop;
    }
    // Whether it will not come because the request was given up.
    KCCL_DEVICE bool is_given_up() const {
        return mem::load_plain(&this->shared().stops[ready_parity_ ^ 1u]) == kRequestOver;
    }

    // Before the end of a pass: tells all blocks if this rank's host has given the request up.
    KCCL_DEVICE void look_at_host(uint32_t pass) {
        if (this->block() != 0 || !leads(block_of_crew())) return;
        const Task& task = this->task();
        const auto* const mailbox = reinterpret_cast<const Mailbox*>(task.mailbox);
        const uint32_t cancelled =
            mem::load<mem::Order::kRelaxed, mem::Scope::kSystem>(&mailbox->cancelled);
        if (cancelled != task.number) return;
        const int rank = this->comm().rank;
        for (int to = 0; to < static_cast<int>(S::kWorldSize); ++to) {
            mem::store<mem::Order::kRelaxed, kReach<S>>(this->given_up(to, pass, rank),
                                                        task.number);
        }
    }

    // Says that the block has done a step, to the blocks of this rank or of all ranks.
    KCCL_DEVICE void finish(uint32_t number, bool tells_all) {
        delays_.wait();
        // Vectors are read by copies.
        mem::fence_copies();
        mem::finish_stores();
        meet();
        if (!leads(block_of_crew())) return;
        if (tells_all) {
            mem::fence<mem::Order::kRelease, kReach<S>>();
        } else {
            mem::fence<mem::Order::kRelease, mem::Scope::kDevice>();
        }
        const int rank = this->comm().rank;
        for (int k = 0; k < (tells_all ? static_cast<int>(S::kWorldSize) : 1); ++k) {
            const int to = (rank + k) % static_cast<int>(S::kWorldSize);
            mem::store<mem::Order::kRelaxed, kReach<S>>(this->done(to, rank, this->block()),
                                                        number);
        }
    }

  private:
    KCCL_DEVICE static Block block_of_crew() { return kccl::block(); }

    // Every phase ends: all warps meet, and a lookout whose wait failed says so.
    KCCL_DEVICE static void await(const mem::CopyBarrier* barrier, uint32_t* parity) {
        while (platform::warp_any(!mem::has_completed(barrier, *parity))) mem::poll_pause();
        *parity ^= 1u;
    }

    Consumer<VectorRing<S>> vectors_;
    Meeting<S::kChunkWarps> meeting_;
    Delays<S> delays_;
    uint32_t ready_parity_ = 0;
};

// The warp that waits and copies. Its functions return false when a wait has failed; then they do
// nothing any more.
template <class S>
class Lookout : public Member<S> {
  public:
    using Dims = Shape<S>;

    KCCL_DEVICE Lookout(const DeviceComm& comm, const Task& task, PrefillShared<S>& shared)
        : Member<S>(comm, task, shared), vectors_(shared.ring, comm) {}

    // Waits until the group's blocks have done a step.
    KCCL_DEVICE bool await_group(uint32_t number) {
        const uint32_t group = this->group();
        return await<mem::Scope::kDevice>(number, Dims::kGroupBlocks, [&](uint32_t i) {
            return uint32_t(this->comm().rank) * S::kBlocks + Dims::block_of(group, i);
        });
    }

    // Waits for the blocks that have the same rows, of all groups of all ranks.
    KCCL_DEVICE bool await_row(uint32_t number) {
        constexpr uint32_t kNum = S::kWorldSize * Dims::kGroups;
        return await<kReach<S>>(number, kNum, [&](uint32_t i) {
            return i / Dims::kGroups * S::kBlocks +
                   Dims::block_of(i % Dims::kGroups, this->member());
        });
    }

    KCCL_DEVICE bool await_all(uint32_t number) {
        return await<kReach<S>>(number, S::kWorldSize * S::kBlocks, [](uint32_t i) { return i; });
    }

    // Whether a host gave the request up in a pass, whose end all blocks have told.
    KCCL_DEVICE bool was_given_up(uint32_t pass) const {
        const uint32_t from = warp().index() < S::kWorldSize ? warp().index() : 0;
        const uint32_t request = mem::load<mem::Order::kRelaxed, kReach<S>>(
            this->given_up(this->comm().rank, pass, from));
        return platform::warp_any(request == this->task().number);
    }

    // Lets the crew go on, or stop.
    KCCL_DEVICE bool let_go(bool is_given_up = false) {
        const uint32_t stop = has_failed_ ? kWaitFailed : is_given_up ? kRequestOver : kNoStop;
        if (stop != kNoStop && leads(warp())) {
            mem::store_plain(&this->shared().stops[ready_parity_], stop);
        }
        ready_parity_ ^= 1u;
        warp().sync();
        if (leads(warp())) mem::arrive(&this->shared().ready);
        return stop == kNoStop;
    }

    // Copies a product's vectors to the crew, as often as it multiplies them (prefill_product.cuh).
    template <class M>
    KCCL_DEVICE void copy(uint32_t place, uint32_t num_tiles) {
        using Plan = ChunkPlan<S, M>;
        constexpr uint32_t kBytes = Plan::kRun * Chunk<S>::kStripe * sizeof(StagedQuad);
        mem::fence_copies();
        for (uint32_t lane = 0; lane < M::kLanes; ++lane) {
            const auto* const vector = reinterpret_cast<const uint8_t*>(this->here(place)) +
                                       uint64_t{lane} * Plan::kRuns * kBytes;
            for (uint32_t i = 0; i < num_tiles * Plan::kParts; i += S::kChunkWarps) {
                for (uint32_t run = 0; run < Plan::kRuns; ++run) {
                    // The crew takes all copies, so this ends.
                    while (!vectors_.try_push(vector + run * kBytes, kBytes, S::kChunkStages)) {
                        mem::poll_pause();
                    }
                }
            }
        }
    }

    KCCL_DEVICE void drain() { vectors_.drain(); }

  private:
    // Waits until `num` blocks have done a step; index_of(i) counts blocks over all ranks.
    template <mem::Scope SCOPE, class IndexOf>
    KCCL_DEVICE bool await(uint32_t number, uint32_t num, IndexOf index_of) {
        if (has_failed_) return false;
        uint32_t late = 0, seen = 0;
        const auto poll = [&] {
            bool are_there = true;
            for (uint32_t i = warp().index(); i < num; i += platform::kWarpSize) {
                const uint32_t index = index_of(i);
                const uint32_t now = mem::load<mem::Order::kRelaxed, SCOPE>(
                    this->done(this->comm().rank, 0, 0) + index);
                if (has_reached(now, number)) continue;
                are_there = false;
                late = index;
                seen = now;
            }
            return are_there;
        };
        bool is_there = false;
        const auto missing = [&] {
            return Missing{is_there ? 0 : 1u << late / S::kBlocks, seen,
                           static_cast<int32_t>(late % S::kBlocks)};
        };
        const Awaited awaited = {kKcclEngineStep, 0, number};
        has_failed_ =
            !wait_until(this->comm(), awaited, [&] { return is_there = poll(); }, missing);
        mem::fence<mem::Order::kAcquire, SCOPE>();
        return !has_failed_;
    }

    Producer<VectorRing<S>> vectors_;
    bool has_failed_ = false;
    // The next phase's. A step of this block lies between two phases, so it is one ahead at most.
    uint32_t ready_parity_ = 0;
};

}  // namespace kccl::decode
