// What the warps of a block that multiply share, and what each of their threads keeps for the whole
// request.
//
// Ops follow each other so, in each block: every warp polls the part of a vector that it
// multiplies, stages it, multiplies, and stores its sums in its area; the warps meet; threads add
// up the sums of all warps, finish the rows and publish them. A warp does not wait for the others
// before it polls for the next op. It has two areas, which take turns: when it writes one, all
// warps have met since the one was last read.
#pragma once

#include "delays.cuh"
#include "weights.cuh"

namespace kccl::decode {

template <class S>
class Worker {
  public:
    using Dims = Shape<S>;

    // The scope of what all ranks exchange.
    static constexpr mem::Scope kReach =
        S::kWorldSize == 1 ? mem::Scope::kDevice : mem::Scope::kSystem;

    KCCL_DEVICE Worker(const DeviceComm& comm, const Task& task, Shared<S>& shared)
        : comm_(comm),
          task_(task),
          shared_(shared),
          weights_(comm, task, shared),
          meeting_(shared.met),
          waiter_(comm, task, &shared.gave_up),
          delays_(comm.rank),
          round_(task.round) {}

    KCCL_DEVICE const DeviceComm& comm() const { return comm_; }
    KCCL_DEVICE const Task& task() const { return task_; }
    KCCL_DEVICE Shared<S>& shared() { return shared_; }
    KCCL_DEVICE Weights<S>& weights() { return weights_; }

    // What follows from the special registers is computed when it is needed. Otherwise the compiler
    // keeps dozens of such values from one op to the next, and has too few registers for the rest.
    // This warp among those that multiply, and this thread in its warp.
    KCCL_DEVICE uint32_t warp_index() const {
        return mem::forget_index(platform::thread_in_block() / platform::kWarpSize);
    }
    KCCL_DEVICE uint32_t thread() const { return mem::forget_index(warp().index()); }
    KCCL_DEVICE uint32_t block() const { return mem::forget_uniform(platform::block_in_grid()); }
    KCCL_DEVICE uint32_t group() const { return Dims::group_of(block()); }
    // This block in its group.
    KCCL_DEVICE uint32_t member() const { return Dims::member_of(block()); }
    // The first lane of the group, over all ranks; and the group's residual.
    KCCL_DEVICE uint32_t first_lane() const {
        return Dims::first_lane_of(comm_.rank) + group() * Dims::kGroupLanes;
    }
    KCCL_DEVICE uint32_t residual_index() const { return S::kNumResiduals == 1 ? 0 : first_lane(); }

    KCCL_DEVICE uint32_t round() const { return round_; }
    KCCL_DEVICE void next_round() {
        ++round_;
        traced_op_ = traced_stage_ = 0;
    }
    KCCL_DEVICE bool failed() const { return waiter_.has_failed(); }

    // ---- Areas ----------------------------------------------------------------------------------

    // Begins an op.
    KCCL_DEVICE void next_op() {
        delays_.wait();
        next_area();
        stamp(kKcclDecodeBegan);
    }

    // Within an op of several parts: the other area takes its turn.
    KCCL_DEVICE void next_area() { op_ ^= 1u; }

    // Ends an op that next_op() has begun.
    KCCL_DEVICE void end_op() {
        stamp(kKcclDecodeFinished);
        if constexpr (S::kTraces) ++traced_op_;
    }

    // Notes the time, where the kernel traces.
    KCCL_DEVICE void stamp(Stamp which) {
        if constexpr (S::kTraces) {
            if (warp_index() != 0 || thread() != 0) return;
            Trace<S>::note(task_, round_ - task_.round, Trace<S>::of_op(traced_op_, which));
        }
    }
    KCCL_DEVICE void stamp_begin() {
        if constexpr (S::kTraces) {
            if (warp_index() != 0 || thread() != 0) return;
            Trace<S>::note_begin(task_, round_ - task_.round);
        }
    }
    // Does what stamp() does, when the warp lets go of the next stage.
    KCCL_DEVICE void stamp_stage() {
        if constexpr (S::kTraces) {
            const uint32_t index = Trace<S>::of_stage(traced_stage_++, kKcclDecodeLetGo);
            if (warp_index() != 0 || thread() != 0) return;
            Trace<S>::note(task_, round_ - task_.round, index);
        }
    }
    KCCL_DEVICE Quad* area(uint32_t warp) { return shared_.area[op_][warp]; }
    // This warp's vector.
    KCCL_DEVICE StagedQuad* staged() { return shared_.staged[warp_index()]; }
    KCCL_DEVICE float* squares(uint32_t warp) { return shared_.squares[op_][warp]; }

    // All warps that multiply wait for each other. False: the request is over, because a wait of
    // one of them failed.
    KCCL_DEVICE bool meet() { return !meeting_.meet(failed()); }

    // ---- The board ------------------------------------------------------------------------------

    KCCL_DEVICE mem::Packet* on_board(int rank, uint32_t place) const {
        return reinterpret_cast<mem::Packet*>(task_.boards[rank]) + place;
    }

    // To the blocks of this rank.
    KCCL_DEVICE void publish(uint32_t place, const Quad& quad) const {
        mem::store_packet<mem::Scope::kDevice>(on_board(comm_.rank, place),
                                               tagged(quad, tag_of(round_)));
    }

    // To those of all ranks, `tag` being that of the round, of its end or of an exchange.
    KCCL_DEVICE void publish_to_all(uint32_t place, const Quad& quad, uint32_t tag) const {
        KCCL_UNROLL
        for (int k = 1; k <= static_cast<int>(S::kWorldSize); ++k) {
            const int rank = (comm_.rank + k) % static_cast<int>(S::kWorldSize);
            mem::store_packet<kReach>(on_board(rank, place), tagged(quad, tag));
        }
    }

    // Waits for quads of this rank's board: see Waiter. ranks: 0: this one publishes them.
    template <mem::Scope SCOPE, int N>
    KCCL_DEVICE void await(const uint32_t (&places)[N], uint32_t wanted, uint32_t tag,
                           Quad (&quads)[N], uint32_t ranks = 0) {
        waiter_.template await<SCOPE>(places, wanted, tag, round_,
                                      ranks == 0 ? 1u << comm_.rank : ranks, quads,
                                      [] { return false; });
    }

    // Waits for a quad of each block of all ranks, [rank][block] from place `first` on. This thread
    // gets those where the result has a bit.
    static constexpr uint32_t kOfAll = ceil_div(S::kWorldSize * S::kBlocks, platform::kWarpSize);
    KCCL_DEVICE uint32_t await_all(uint32_t first, uint32_t tag, Quad (&quads)[kOfAll]) {
        uint32_t places[kOfAll], wanted = 0;
        KCCL_UNROLL
        for (uint32_t k = 0; k < kOfAll; ++k) {
            const uint32_t at = thread() + k * platform::kWarpSize;
            const bool is_there = at < S::kWorldSize * S::kBlocks;
            wanted |= is_there ? 1u << k : 0;
            places[k] = first + (is_there ? at : 0);
        }
        await<kReach>(places, wanted, tag, quads, (1u << S::kWorldSize) - 1);
        return wanted;
    }

    // ---- Messages -------------------------------------------------------------------------------

    // Waits for the sums of the messages that the next receiving module adds, in shared().landed.
    // The warp that collects them comes here too, also when its waits fail. So this ends.
    KCCL_DEVICE void await_landed() {
        if constexpr (!S::kOverlaps) arrive_together(&shared_.was_read);
        while (platform::warp_any(!mem::has_completed(&shared_.has_landed, landed_parity_))) {
            mem::poll_pause();
        }
        landed_parity_ ^= 1u;
        if (mem::load_plain(&shared_.landed_failed) != 0) waiter_.fail();
    }

    // They may be overwritten.
    KCCL_DEVICE void let_landed_go() {
        if constexpr (S::kOverlaps) arrive_together(&shared_.was_read);
    }

    // ---- Where nothing overlaps (S::kOverlaps) --------------------------------------------------

    // Behind an op: all blocks of all ranks wait for each other. A wait that fails makes the next
    // meet() fail.
    KCCL_DEVICE void meet_all() {
        if constexpr (!S::kOverlaps) {
            mem::finish_stores();
            if (!meet()) waiter_.fail();
            if (warp_index() == 0) {
                const uint32_t tag = tag_of_end(num_meetings_);
                const uint32_t first = Places<S>::meeting(num_meetings_);
                if (leads(warp())) {
                    mem::fence<mem::Order::kRelease, kReach>();
                    publish_to_all(first + comm_.rank * S::kBlocks + block(), Quad{}, tag);
                }
                Quad quads[kOfAll];
                (void)await_all(first, tag, quads);
                mem::fence<mem::Order::kAcquire, kReach>();
            }
            ++num_meetings_;
            if (!meet()) waiter_.fail();
        }
    }

    // Ends the meetings of a round. Places and tags repeat every fourth time, so that each round
    // has a multiple of four, and begins as the one before: board.cuh.
    KCCL_DEVICE void end_meetings() {
        while (!S::kOverlaps && num_meetings_ % 4 != 0) meet_all();
    }

    // The residual's quads of this thread: see own_quad() in product.cuh.
    Quad residual[Dims::kOwnQuads];

  private:
    const DeviceComm& comm_;
    const Task& task_;
    Shared<S>& shared_;
    Weights<S> weights_;
    Meeting<S::kWarps> meeting_;
    Waiter<S> waiter_;
    Delays<S> delays_;
    uint32_t round_;
    uint32_t op_ = 0;
    uint32_t traced_op_ = 0;
    uint32_t traced_stage_ = 0;
    uint32_t landed_parity_ = 0;
    uint32_t num_meetings_ = 0;
};

// Adds up a value over a warp, in a fixed order; all threads get the sum.
KCCL_DEVICE float sum_of_warp(float value) {
    return platform::reduce_lanes<platform::kWarpSize>(value,
                                                       [](float a, float b) { return a + b; });
}

}  // namespace kccl::decode
