// When what happened in a block: a kernel that traces notes the times of a request's first rounds.
//
// A round's stamps are ticks of the block's multiprocessor (mem::clock_ticks): those of its ops,
// [op][Stamp], and behind them those of its stages of weights, [stage][StageStamp]. The last two
// are the ticks and the nanoseconds at its beginning, so that the host can compare blocks. A stamp
// that a block does not reach stays zero. The host reads them in engine/model/timeline.py, which
// knows from trace_layout.cuh what lies where.
#pragma once

#include "shape.cuh"
#include "task.cuh"

namespace kccl::decode {

template <class S>
struct Trace {
    // Those of each layer, the head, the end.
    static constexpr uint32_t kOps = S::kNumOps * S::kNumLayers + 2;

    template <class M>
    KCCL_CONSTEXPR static uint32_t stages_of(uint32_t at_once) {
        uint32_t stages = 0;
        for (uint32_t tiles = M::kMostTiles; tiles > 0;) {
            const uint32_t now = tiles < at_once ? tiles : at_once;
            stages += ceil_div(now * M::kAllSteps, S::kStageSteps);
            tiles -= now;
        }
        return stages;
    }
    template <class... M>
    KCCL_CONSTEXPR static uint32_t stages_of_all(Matrices<M...>) {
        return (stages_of<M>(~0u) + ...);
    }
    // The most that a block has.
    static constexpr uint32_t kStages = S::kNumLayers * stages_of_all(Products<S>{}) +
                                        stages_of<typename Shape<S>::Head>(S::kHeadTiles);
    static constexpr uint32_t kOfRound =
        kOps * kKcclDecodeNumStamps + kStages * kKcclDecodeNumStageStamps + 2;

    // Called by one thread. round: of the request.
    KCCL_DEVICE static void note(const Task& task, uint32_t round, uint32_t index, uint64_t time) {
        if (!S::kTraces || round >= task.traced) return;
        const uint64_t at =
            (uint64_t{round} * kOfRound + index) * S::kBlocks + platform::block_in_grid();
        mem::store_plain(reinterpret_cast<uint64_t*>(task.trace) + at, time);
    }
    KCCL_DEVICE static void note(const Task& task, uint32_t round, uint32_t index) {
        note(task, round, index, mem::clock_ticks());
    }
    KCCL_DEVICE static void note_begin(const Task& task, uint32_t round) {
        note(task, round, kOfRound - 2);
        note(task, round, kOfRound - 1, mem::clock_ns());
    }
    KCCL_CONSTEXPR static uint32_t of_op(uint32_t op, Stamp stamp) {
        return op * kKcclDecodeNumStamps + stamp;
    }
    KCCL_CONSTEXPR static uint32_t of_stage(uint32_t stage, StageStamp stamp) {
        return kOps * kKcclDecodeNumStamps + stage * kKcclDecodeNumStageStamps + stamp;
    }
};

// The stages that a block asks for, in their order, over all rounds.
template <class S>
class StageTrace {
  public:
    KCCL_DEVICE explicit StageTrace(const Task& task) : task_(task) {}

    KCCL_DEVICE void ask() { note(round_, asked_++, kKcclDecodeAsked); }
    KCCL_DEVICE void end_round() {
        of_last_round_ = asked_;
        asked_ = 0;
        ++round_;
    }
    // So many of those asked for have not landed.
    KCCL_DEVICE void see(uint32_t num_in_flight) {
        while (num_pending() > num_in_flight) {
            if (landing_round_ != round_ && landed_ == of_last_round_) {
                landing_round_ = round_;
                landed_ = 0;
            }
            note(landing_round_, landed_++, kKcclDecodeLanded);
        }
    }

  private:
    // Fewer are in flight than a round has, so that only two rounds count.
    KCCL_DEVICE uint32_t num_pending() const {
        return landing_round_ == round_ ? asked_ - landed_ : of_last_round_ - landed_ + asked_;
    }
    KCCL_DEVICE void note(uint32_t round, uint32_t stage, StageStamp stamp) const {
        if (leads(warp())) Trace<S>::note(task_, round, Trace<S>::of_stage(stage, stamp));
    }

    const Task& task_;
    uint32_t round_ = 0, asked_ = 0, of_last_round_ = 0;
    uint32_t landing_round_ = 0, landed_ = 0;
};

}  // namespace kccl::decode
