// Records the times of events in a block, in the first token steps of a request, if the kernel
// traces.
//
// The stamps of a token step are ticks of the block's multiprocessor (mem::clock_ticks): those of
// its ops, [op][Stamp], and behind them those of its stages of weights, [stage][StageStamp]. The
// last two stamps are the ticks and the nanoseconds at the token step's beginning, so that the host
// can compare blocks. A stamp that a block does not reach stays zero. The host reads the stamps in
// engine/model/timeline.py, which knows from trace_layout.cuh where each lies.
#pragma once

#include "shape.cuh"
#include "task.cuh"

namespace kccl::decode {

template <class S>
struct Trace {
    // How many ops a token step has: those of each layer, the head, and its end.
    static constexpr uint32_t kOps = S::kNumOps * S::kNumLayers + 2;

    template <class M>
    KCCL_CONSTEXPR static uint32_t stages_of(uint32_t at_once) {
        uint32_t stages = 0;
        for (uint32_t tiles = M::kMostTiles; tiles > 0;) {
            const uint32_t now = tiles < at_once ? tiles : at_once;
            stages += ceil_div(now * M::kAllSteps, M::kStageSteps);
            tiles -= now;
        }
        return stages;
    }
    template <class... M>
    KCCL_CONSTEXPR static uint32_t stages_of_all(Matrices<M...>) {
        return (stages_of<M>(~0u) + ...);
    }
    // The largest number of stages of weights that a block has in a token step.
    static constexpr uint32_t kStages = S::kNumLayers * stages_of_all(Products<S>{}) +
                                        stages_of<typename Shape<S>::Head>(S::kHeadTiles);
    static constexpr uint32_t kOfTokenStep =
        kOps * kKcclDecodeNumStamps + kStages * kKcclDecodeNumStageStamps + 2;

    // Records `time` as stamp `index` of a token step, if the token step is traced. token_step: its
    // number in the request. Called by one thread.
    KCCL_DECODE static void record(const Task& task, uint32_t token_step, uint32_t index,
                                   uint64_t time) {
        if (!S::kTraces || token_step >= task.traced) return;
        const uint64_t at =
            (uint64_t{token_step} * kOfTokenStep + index) * S::kBlocks + platform::block_in_grid();
        mem::store_plain(reinterpret_cast<uint64_t*>(task.trace) + at, time);
    }
    KCCL_DECODE static void record(const Task& task, uint32_t token_step, uint32_t index) {
        record(task, token_step, index, mem::clock_ticks());
    }
    KCCL_DECODE static void record_begin(const Task& task, uint32_t token_step) {
        record(task, token_step, kOfTokenStep - 2);
        record(task, token_step, kOfTokenStep - 1, mem::clock_ns());
    }
    KCCL_CONSTEXPR static uint32_t of_op(uint32_t op, Stamp stamp) {
        return op * kKcclDecodeNumStamps + stamp;
    }
    KCCL_CONSTEXPR static uint32_t of_stage(uint32_t stage, StageStamp stamp) {
        return kOps * kKcclDecodeNumStamps + stage * kKcclDecodeNumStageStamps + stamp;
    }
};

// Records when a block's stages of weights are requested and when they land, in their order, over
// all token steps. All threads of the producer warp make an object and call its functions.
template <class S>
class StageTrace {
  public:
    KCCL_DECODE explicit StageTrace(const Task& task) : task_(task) {}

    KCCL_DECODE void ask() { record(token_step_, asked_++, kKcclDecodeAsked); }
    KCCL_DECODE void end_token_step() {
        of_last_token_step_ = asked_;
        asked_ = 0;
        ++token_step_;
    }
    // Called with the number of requested stages that have not landed. Records that the others have
    // landed now, as far as that is not recorded yet.
    KCCL_DECODE void see(uint32_t num_in_flight) {
        while (num_pending() > num_in_flight) {
            if (landing_token_step_ != token_step_ && landed_ == of_last_token_step_) {
                landing_token_step_ = token_step_;
                landed_ = 0;
            }
            record(landing_token_step_, landed_++, kKcclDecodeLanded);
        }
    }

  private:
    // Returns how many requested stages are not recorded as landed. Fewer stages are in flight than
    // a token step has, so they belong to this token step or the last one.
    KCCL_DECODE uint32_t num_pending() const {
        return landing_token_step_ == token_step_ ? asked_ - landed_
                                                  : of_last_token_step_ - landed_ + asked_;
    }
    KCCL_DECODE void record(uint32_t token_step, uint32_t stage, StageStamp stamp) const {
        if (leads(warp())) Trace<S>::record(task_, token_step, Trace<S>::of_stage(stage, stamp));
    }

    const Task& task_;
    uint32_t token_step_ = 0, asked_ = 0, of_last_token_step_ = 0;
    uint32_t landing_token_step_ = 0, landed_ = 0;
};

// Does what StageTrace does where stages are requested in another order than they are used
// (pool_order.cuh), into SLOTS slots. They are numbered in the order of their use.
template <class S, uint32_t SLOTS>
class PoolTrace {
  public:
    KCCL_DECODE explicit PoolTrace(const Task& task) : task_(task) {}

    // Records that a stage is requested, and goes on to the next number. see() has been called
    // since the slot was freed.
    KCCL_DECODE void ask(uint32_t slot) {
        record(token_step_, next_, kKcclDecodeAsked);
        if constexpr (S::kTraces) {
            stages_[slot] = {token_step_, next_};
            flying_ |= 1u << slot;
            ++next_;
        }
    }
    // The next stage that is requested is used `num` stages later than the one whose turn it is.
    KCCL_DECODE void skip(uint32_t num) { next_ += num; }
    KCCL_DECODE void go_back(uint32_t num) { next_ -= num; }
    KCCL_DECODE void end_token_step() {
        next_ = 0;
        ++token_step_;
    }
    // As StageTrace::see(), with PoolProducer::slots_in_flight(). Stages may land in any order.
    KCCL_DECODE void see(uint32_t in_flight) {
        if constexpr (S::kTraces) {
            for (uint32_t slot = 0; slot < SLOTS; ++slot) {
                if ((flying_ & ~in_flight) >> slot & 1u) {
                    record(stages_[slot].token_step, stages_[slot].number, kKcclDecodeLanded);
                }
            }
            flying_ &= in_flight;
        }
    }

  private:
    struct Stage {
        uint32_t token_step;
        uint32_t number;
    };

    KCCL_DECODE void record(uint32_t token_step, uint32_t stage, StageStamp stamp) const {
        if (leads(warp())) Trace<S>::record(task_, token_step, Trace<S>::of_stage(stage, stamp));
    }

    const Task& task_;
    Stage stages_[S::kTraces ? SLOTS : 1];  // slot -> the last stage that was requested into it
    uint32_t flying_ = 0;                   // bit i: the stage of slot i is not recorded as landed
    uint32_t token_step_ = 0, next_ = 0;
};

}  // namespace kccl::decode
