// What the warps of a block that multiply share, and what each of their threads keeps for the whole
// request.
//
// Ops follow each other so, in each block: every warp polls the part of a vector that it
// multiplies, stages it, multiplies, and stores its sums in its area; the warps meet; threads add
// up the sums of all warps, finish the rows and publish them. A warp does not wait for the others
// before it polls for the next op. It has two areas, which take turns: when it writes one, all
// warps have met since the one was last read.
#pragma once

#include "watch.cuh"

namespace kccl::decode {

// In block-shared memory, beside the ring.
template <class S>
struct Beside {
    StagedQuad staged[S::kWarps][Shape<S>::kMostStaged];
    // [op % 2][warp]
    Quad area[2][S::kWarps][Shape<S>::kMostSums];
    // Strands of attention: [strand][query head]: quads of a head, then {maximum, sum, -, -}.
    Quad parts[Shape<S>::kSplitStrands][Shape<S>::kHeadsPerKv][Shape<S>::kPartQuads];
    // Sums of squares of each warp's part of a vector: [op % 2][warp][residual].
    float squares[2][S::kWarps][S::kNumResiduals];
    // At the end of a round: each warp's most likely token, and what all blocks say.
    Note best[S::kWarps];
    Note ending;
    // What each warp, and then all blocks, have found: sample.cuh.
    Note notes[S::kWarps][kNumNotes];
    Note found[kNumNotes];
    uint32_t exchanges;  // the next exchange's number
    mem::CopyBarrier met;
    mem::CopyBarrier ended;    // its first phase ends when the warps that multiply have ended
    mem::CopyBarrier gave_up;  // likewise, when their waits are to fail
    // By the parity of the meeting, a byte of each warp; read as one line.
    struct alignas(16) Failed {
        uint8_t of_warp[16];
    } failed[2];
    int32_t token;
    uint32_t end;  // End
};

// Stages of the ring: as many as fit.
template <class S>
KCCL_CONSTEXPR uint32_t num_stages() {
    constexpr uint32_t kEach = Shape<S>::kStageBytes + 2 * sizeof(mem::CopyBarrier);
    constexpr uint32_t kRest = sizeof(Beside<S>) + 2 * kKcclLineBytes;  // and what aligns the ring
    static_assert(kRest + kEach <= S::kSharedBytes, "a block has enough memory");
    constexpr uint32_t kFit = (S::kSharedBytes - kRest) / kEach;
    return kFit < S::kMostStages ? kFit : S::kMostStages;
}

template <class S>
using WeightRing = Ring<num_stages<S>(), Shape<S>::kStageBytes>;

template <class S>
struct Shared : Beside<S> {
    WeightRing<S> ring;
};

template <class S>
class Worker {
  public:
    using Dims = Shape<S>;

    // Of what all ranks exchange.
    static constexpr mem::Scope kReach =
        S::kWorldSize == 1 ? mem::Scope::kDevice : mem::Scope::kSystem;

    KCCL_DEVICE Worker(const DeviceComm& comm, const Task& task, Shared<S>& shared)
        : comm_(comm),
          task_(task),
          shared_(shared),
          weights_(shared.ring, comm),
          round_(task.round) {}

    KCCL_DEVICE const DeviceComm& comm() const { return comm_; }
    KCCL_DEVICE const Task& task() const { return task_; }
    KCCL_DEVICE Shared<S>& shared() { return shared_; }
    KCCL_DEVICE Consumer<WeightRing<S>>& weights() { return weights_; }

    // What follows from the special registers is computed when it is needed. Otherwise the compiler
    // keeps dozens of such values from one op to the next, and has too few registers for the rest.
    // This warp among those that multiply, and this thread in its warp.
    KCCL_DEVICE uint32_t warp_index() const {
        return mem::forget(platform::thread_in_block() / platform::kWarpSize);
    }
    KCCL_DEVICE uint32_t thread() const { return mem::forget(warp().index()); }
    KCCL_DEVICE uint32_t block() const { return mem::forget(platform::block_in_grid()); }
    KCCL_DEVICE uint32_t group() const { return block() / Dims::kGroupBlocks; }
    // This block in its group.
    KCCL_DEVICE uint32_t member() const { return block() % Dims::kGroupBlocks; }
    // The first lane of the group, over all ranks; and the group's residual.
    KCCL_DEVICE uint32_t first_lane() const {
        return comm_.rank * Dims::kLanesHere + group() * Dims::kGroupLanes;
    }
    KCCL_DEVICE uint32_t residual_index() const { return S::kNumResiduals == 1 ? 0 : first_lane(); }

    KCCL_DEVICE uint32_t round() const { return round_; }
    KCCL_DEVICE void next_round() {
        ++round_;
        traced_op_ = 0;
    }
    KCCL_DEVICE bool failed() const { return failed_; }

    // ---- Areas ----------------------------------------------------------------------------------

    // Begins an op: the other area takes its turn.
    KCCL_DEVICE void next_op() {
        op_ ^= 1u;
        stamp(kBegan);
    }

    // Ends an op that next_op() has begun.
    KCCL_DEVICE void end_op() {
        stamp(kFinished);
        if constexpr (S::kTraces) ++traced_op_;
    }

    // Notes the time, where the kernel traces.
    KCCL_DEVICE void stamp(Stamp which) {
        if constexpr (S::kTraces) {
            const uint32_t round = round_ - task_.round;
            if (round >= task_.traced || warp_index() != 0 || thread() != 0) return;
            const uint64_t at =
                ((uint64_t{round} * kTracedOps + traced_op_) * kNumStamps + which) * S::kBlocks +
                block();
            mem::store_plain(reinterpret_cast<uint64_t*>(task_.trace) + at, mem::clock_ns());
        }
    }
    // Ops of a round: five of each layer, the head, the end.
    static constexpr uint32_t kTracedOps = 5 * S::kNumLayers + 2;
    KCCL_DEVICE Quad* area(uint32_t warp) { return shared_.area[op_][warp]; }
    // This warp's vector.
    KCCL_DEVICE StagedQuad* staged() { return shared_.staged[warp_index()]; }
    KCCL_DEVICE float* squares(uint32_t warp) { return shared_.squares[op_][warp]; }

    // All warps of the block wait for each other. False: the request is over, because a wait of one
    // of them failed.
    KCCL_DEVICE bool meet() {
        const Warp coop = warp();
        coop.sync();
        if (leads(coop)) {
            if (failed_) {
                mem::store_plain(&shared_.failed[met_parity_].of_warp[warp_index()], uint8_t{1});
            }
            mem::arrive(&shared_.met);
        }
        // Every warp comes, also one whose waits fail. So this ends.
        while (platform::warp_any(!mem::has_completed(&shared_.met, met_parity_))) {
            mem::poll_pause();
        }
        static_assert(S::kWarps <= sizeof(shared_.failed[0].of_warp), "a byte for each warp");
        const auto failed =
            mem::load_plain(reinterpret_cast<const mem::Line*>(&shared_.failed[met_parity_]));
        const bool over = (failed.word[0] | failed.word[1]) != 0;
        met_parity_ ^= 1u;
        return !over;
    }

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

    // Waits for the quads at places[i] of this rank's board, where `wanted` has bit i. ranks: which
    // ones publish them, a bit each; 0: this one. All threads of a warp call it; a thread may want
    // none. After a failed wait the quads are zero, and so are those of all later waits of this
    // warp.
    template <mem::Scope SCOPE, int N>
    KCCL_DEVICE void await(const uint32_t (&places)[N], uint32_t wanted, uint32_t tag,
                           Quad (&quads)[N], uint32_t ranks = 0) {
        mem::Packet packets[N];
        const mem::Packet* const board = on_board(comm_.rank, 0);
        // All are loaded before any is checked, so that their latencies overlap.
        const auto poll = [&] {
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
        bool is_noted = false;
        while (!failed_ && platform::warp_any(!poll())) {
            mem::poll_pause();
            if (++polls < comm_.polls_per_check) continue;
            polls = 0;
            is_noted = true;
            note_wait(ranks == 0 ? 1u << comm_.rank : ranks);
            failed_ = platform::warp_any(mem::has_completed_now(&shared_.gave_up, 0));
        }
        if (is_noted) note_wait(0);
        KCCL_UNROLL
        for (int i = 0; i < N; ++i) {
            const bool is_here = !failed_ && (wanted >> i & 1u) != 0;
            quads[i] = is_here ? quad_of(packets[i]) : Quad{};
        }
    }

    // Writes down what the warp waits for; 0: nothing any more.
    KCCL_DEVICE void note_wait(uint32_t ranks) {
        if (!leads(warp())) return;
        mem::store<mem::Order::kRelaxed, mem::Scope::kDevice>(
            wait_at<S>(comm_, task_, warp_index()), ranks == 0 ? 0 : wait_word(ranks, round_));
    }

    // The residual's quads of this thread: see own_quad() in product.cuh.
    Quad residual[Dims::kOwnQuads];

  private:
    const DeviceComm& comm_;
    const Task& task_;
    Shared<S>& shared_;
    Consumer<WeightRing<S>> weights_;
    uint32_t round_;
    uint32_t op_ = 0;
    uint32_t traced_op_ = 0;
    uint32_t met_parity_ = 0;
    bool failed_ = false;
};

// Adds up a value over a warp, in a fixed order; all threads get the sum.
KCCL_DEVICE float sum_of_warp(float value) {
    const uint32_t thread = warp().index();
    KCCL_UNROLL
    for (uint32_t step = platform::kWarpSize / 2; step > 0; step /= 2) {
        value += platform::shuffle(value, thread ^ step);
    }
    return value;
}

}  // namespace kccl::decode
