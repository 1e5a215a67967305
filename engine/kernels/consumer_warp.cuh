// The consumer warps of a block, which multiply: what they share, and what each of their threads
// keeps for the whole request. The words are explained in engine/README.md.
//
// In each block, an op has these steps. Every warp polls for the part of a vector that it
// multiplies, stages it (stores it in shared memory), multiplies, and stores its sums in its area
// of shared memory. The warps meet. Then threads add up the sums of all warps, finish the rows and
// publish them. A warp polls for the next op's vector without waiting for the other warps. So it
// has two areas, which take turns: other warps may still read one while it writes the other. When a
// warp writes an area again, all warps have met since the area was last read. Where there is no
// memory for two (kAreas), the warps meet at the beginning of each op.
#pragma once

#include "delays.cuh"
#include "weights.cuh"

namespace kccl::decode {

template <class S>
class ConsumerWarp {
  public:
    using Dims = Shape<S>;

    // The memory scope of exchanges between all ranks. It is only the device if there is one rank.
    static constexpr mem::Scope kReach =
        S::kWorldSize == 1 ? mem::Scope::kDevice : mem::Scope::kSystem;

    KCCL_DECODE ConsumerWarp(const DeviceComm& comm, const Task& task, Shared<S>& shared)
        : comm_(comm),
          task_(task),
          shared_(shared),
          weights_(comm, task, shared),
          meeting_(shared.met),
          waiter_(comm, task, &shared.gave_up),
          delays_(comm.rank),
          token_step_(task.token_step),
          uses_(uses_of(task.uses)) {}

    KCCL_DECODE const DeviceComm& comm() const { return comm_; }
    KCCL_DECODE const Task& task() const { return task_; }
    KCCL_DECODE Shared<S>& shared() { return shared_; }
    KCCL_DECODE Weights<S>& weights() { return weights_; }

    // Values that follow from special registers are computed when they are needed. Otherwise the
    // compiler keeps dozens of them from one op to the next, and has too few registers for the
    // rest. warp_index() is the warp's number among the consumer warps, thread() the thread's in
    // its warp.
    KCCL_DECODE uint32_t warp_index() const {
        return mem::forget_index(platform::thread_in_block() / platform::kWarpSize);
    }
    KCCL_DECODE uint32_t thread() const { return mem::forget_index(warp().index()); }
    KCCL_DECODE uint32_t block() const { return mem::forget_uniform(platform::block_in_grid()); }
    KCCL_DECODE uint32_t lane_group() const { return Dims::lane_group_of(block()); }
    // Returns this block's number in its lane group (the blocks that share a residual: shape.cuh).
    KCCL_DECODE uint32_t block_in_group() const { return Dims::block_in_group_of(block()); }
    // first_lane() returns the number of the lane group's first lane, counted over all ranks.
    // residual_index() returns the number of the lane group's residual.
    KCCL_DECODE uint32_t first_lane() const {
        return Dims::first_lane_of(comm_.rank) + lane_group() * Dims::kLanesPerGroup;
    }
    KCCL_DECODE uint32_t residual_index() const { return S::kNumResiduals == 1 ? 0 : first_lane(); }

    KCCL_DECODE uint32_t token_step() const { return token_step_; }
    KCCL_DECODE void next_token_step() {
        if constexpr (S::kColumns > 1) count_step(&uses_, num_columns_);
        ++token_step_;
        traced_op_ = traced_stage_ = 0;
    }
    KCCL_DECODE bool failed() const { return waiter_.has_failed(); }

    // ---- Columns --------------------------------------------------------------------------------

    // Begins a token step at `position`. token: that position's id, unless the request began with
    // it. The ids of the other columns are the request's or drafts.
    KCCL_DECODE void begin_columns(uint32_t position, int32_t token) {
        if constexpr (S::kColumns > 1) {
            position_ = position;
            num_columns_ = num_next_;
            token_ = token;
        }
    }
    // Ends a token step: the positions of its first `num_kept` columns belong to the text now. The
    // next token step has num_next columns.
    KCCL_DECODE void end_columns(uint32_t num_kept, uint32_t num_next) {
        num_kept_ = num_kept;
        num_next_ = num_next;
    }
    KCCL_DECODE uint32_t num_kept() const {
        if constexpr (S::kColumns == 1) return 1;
        return num_kept_;
    }
    KCCL_DECODE uint32_t num_columns() const {
        if constexpr (S::kColumns == 1) return 1;
        return num_columns_;
    }
    KCCL_DECODE void count_shared_mean() { uses_.low ^= 1u << kMeanUse; }
    KCCL_DECODE const Uses& uses() const { return uses_; }
    // Returns the id of a column that runs a draft.
    KCCL_DECODE int32_t draft_of(uint32_t column) const {
        return mem::load_plain(&shared_.drafts[column]);
    }
    // Returns the number of a column's control words at the end of the token step: how often the
    // column was used before, modulo 4 where there are several columns.
    KCCL_DECODE uint32_t number_of_end(uint32_t column) const {
        if constexpr (S::kColumns == 1) return token_step_;
        return (uses_.low >> column & 1u) | (uses_.high >> column & 1u) << 1;
    }
    // Returns the id that a column runs. token: that of column 0.
    KCCL_DECODE int32_t id_of(int32_t token, uint32_t column) const {
        if constexpr (S::kColumns == 1) {
            return token;
        } else if constexpr (S::kHasSeats) {
            const Task& task = task_of<S>(task_, column);
            const auto* const ids = reinterpret_cast<const int32_t*>(task.ids);
            return mem::load_plain(position_ == 0 ? ids + task.start : &shared_.tokens[column]);
        } else {
            const uint32_t at = position_ + column;
            if (at < task_.num_ids) {
                return mem::load_plain(reinterpret_cast<const int32_t*>(task_.ids) + at);
            }
            return column == 0 ? token_ : draft_of(column);
        }
    }

    // Returns the tag of the vectors of a column.
    KCCL_DECODE uint32_t tag(uint32_t column) const {
        if constexpr (S::kColumns == 1) return tag_of(token_step_);
        return (uses_.low >> column & 1u) ^ 1u;
    }
    // Returns the tags of float4s of the columns from `first` on, EACH of each.
    template <uint32_t EACH>
    KCCL_DECODE auto tags(uint32_t first) const {
        if constexpr (S::kColumns == 1) {
            return tag_of(token_step_);
        } else {
            return ColumnTags<EACH>{~uses_.low >> first};
        }
    }
    // Returns the tag of a column's result of attention (Slots::attended), and the tags of those of
    // the columns from `first` on, EACH float4s of each. If kernels with one column do not merge
    // first, only the others write these slots. Then column 0's tags must not count the token steps
    // of kernels with one column.
    KCCL_DECODE uint32_t attended_tag(uint32_t column) const {
        constexpr bool kHasOwnUse = S::kColumns > 1 && !S::kMergesAlways;
        return tag(kHasOwnUse && column == 0 ? kMergedUse : column);
    }
    template <uint32_t EACH>
    KCCL_DECODE auto attended_tags(uint32_t first) const {
        if constexpr (S::kColumns == 1) {
            return tag_of(token_step_);
        } else {
            return ColumnTags<EACH>{((~uses_.low & ~1u) | attended_tag(0)) >> first};
        }
    }
    // Repeats `wanted`, the bits of EACH float4s of a column, for NUM columns from `first` on, as
    // far as the token step uses them.
    template <uint32_t EACH, uint32_t NUM>
    KCCL_DECODE uint32_t wanted_of(uint32_t wanted, uint32_t first) const {
        if constexpr (S::kColumns == 1) return wanted;
        uint32_t all = 0;
        KCCL_UNROLL
        for (uint32_t i = 0; i < NUM; ++i) {
            all |= first + i < num_columns_ ? wanted << i * EACH : 0;
        }
        return all;
    }
    // Calls f(first) for the first of each AT_ONCE columns that the token step uses.
    template <uint32_t AT_ONCE, class F>
    KCCL_DECODE void for_columns(F f) const {
        if constexpr (S::kColumns == 1) {
            f(0u);
        } else {
#pragma unroll 1
            for (uint32_t first = 0; first < num_columns_; first += AT_ONCE) f(first);
        }
    }

    // ---- Areas ----------------------------------------------------------------------------------

    // Begins an op, and switches to the warp's other area.
    KCCL_DECODE void next_op() {
        delays_.wait();
        next_area();
        stamp(kKcclDecodeBegan);
    }

    // Begins the next part of an op in the other area, or waits until all have read the only one.
    KCCL_DECODE void next_area() {
        op_ ^= 1u;
        if constexpr (kAreas<S> == 1) (void)meet();
    }

    // Ends an op that next_op() has begun.
    KCCL_DECODE void end_op() {
        stamp(kKcclDecodeFinished);
        if constexpr (S::kTraces) ++traced_op_;
    }

    // Records the time at which the block's first warp has come to a point of the op, if the kernel
    // traces (trace.cuh).
    KCCL_DECODE void stamp(Stamp which) {
        if constexpr (S::kTraces) {
            if (warp_index() != 0 || thread() != 0) return;
            Trace<S>::record(task_, token_step_ - task_.token_step,
                             Trace<S>::of_op(traced_op_, which));
        }
    }
    KCCL_DECODE void stamp_begin() {
        if constexpr (S::kTraces) {
            if (warp_index() != 0 || thread() != 0) return;
            Trace<S>::record_begin(task_, token_step_ - task_.token_step);
        }
    }
    // Records, if the kernel traces, when the block's first warp has freed a stage of weights.
    // Called once for each stage of a token step, in their order.
    KCCL_DECODE void stamp_stage() {
        if constexpr (S::kTraces) {
            const uint32_t index = Trace<S>::of_stage(traced_stage_++, kKcclDecodeLetGo);
            if (warp_index() != 0 || thread() != 0) return;
            Trace<S>::record(task_, token_step_ - task_.token_step, index);
        }
    }
    KCCL_DECODE uint32_t area_of_op() const { return kAreas<S> == 1 ? 0 : op_; }
    // Returns a warp's area. That of a column begins kMostSums float4s behind that of the column
    // before.
    KCCL_DECODE Float4* area(uint32_t warp) { return shared_.area[area_of_op()][warp]; }
    // Returns where in shared memory this warp stages its part of a vector. Column c's part begins
    // at staged(c).
    KCCL_DECODE StagedFloat4* staged() { return shared_.staged[warp_index()]; }
    KCCL_DECODE StagedFloat4* staged(uint32_t column) {
        return staged() + column * Dims::kMostStaged;
    }
    // Returns a partial result of attention: of a KV strand of the KV split, for a query.
    KCCL_DECODE Float4* partial(uint32_t kv_strand, uint32_t query) {
        if constexpr (kStagesPartials<S>) {
            const uint32_t number = kv_strand / S::kWarps * Columns<S>::kQueries + query;
            return reinterpret_cast<Float4*>(shared_.staged[kv_strand % S::kWarps]) +
                   StagedPartials<S>::kQueries + number * Dims::kPartialFloat4s;
        } else {
            return shared_.partials[kv_strand][query];
        }
    }
    KCCL_DECODE float* squares(uint32_t warp) { return shared_.squares[area_of_op()][warp]; }

    // Waits until all consumer warps have called this. Returns false if a wait of one of them has
    // failed, which ends the request.
    KCCL_DECODE bool meet() { return !meeting_.meet(failed()); }
    // Meets likewise. Returns whether any thread passed true. No wait may have failed since meet().
    KCCL_DECODE bool meet_any(bool mine) { return meeting_.meet(mine); }

    // ---- The exchange buffer --------------------------------------------------------------------

    KCCL_DECODE mem::Packet* in_exchange_buffer(int rank, uint32_t slot) const {
        return reinterpret_cast<mem::Packet*>(task_.exchange_buffers[rank]) + slot;
    }

    // Publishes a float4 of a column to the blocks of this rank: stores it in the rank's exchange
    // buffer, with the column's tag (exchange_buffer.cuh).
    KCCL_DECODE void publish(uint32_t slot, const Float4& four, uint32_t column = 0) const {
        slot = Slots<S>::in_column(slot, column);
        mem::store_packet<mem::Scope::kDevice>(in_exchange_buffer(comm_.rank, slot),
                                               tagged(four, tag(column)));
    }

    // Does the same for the result of attention, with attended_tag().
    KCCL_DECODE void publish_attended(uint32_t slot, const Float4& four, uint32_t column) const {
        slot = Slots<S>::in_column(slot, column);
        mem::store_packet<mem::Scope::kDevice>(in_exchange_buffer(comm_.rank, slot),
                                               tagged(four, attended_tag(column)));
    }

    // Publishes a float4 to the blocks of all ranks: stores it in their exchange buffers. tag:
    // tag_of() the token step for vectors, tag_of_end() for control words and meetings.
    KCCL_DECODE void publish_to_all(uint32_t slot, const Float4& four, uint32_t tag) const {
        KCCL_UNROLL
        for (int k = 1; k <= static_cast<int>(S::kWorldSize); ++k) {
            const int rank = (comm_.rank + k) % static_cast<int>(S::kWorldSize);
            mem::store_packet<kReach>(in_exchange_buffer(rank, slot), tagged(four, tag));
        }
    }

    // Waits for float4s of this rank's exchange buffer: see Waiter::await() in watch.cuh. ranks:
    // the ranks that publish them, a bit each, so that a failed wait can name them. 0 means this
    // rank. may_scout: see Waiter::await(); false where the op's first float4s have come already.
    template <mem::Scope SCOPE, bool SCOUTS = true, int N, class Tag>
    KCCL_DECODE void await(const uint32_t (&slots)[N], uint32_t wanted, Tag tag,
                           Float4 (&float4s)[N], uint32_t ranks = 0, bool may_scout = true) {
        waiter_.template await<SCOPE, SCOUTS && kScouts<S>>(
            slots, wanted, tag, token_step_, ranks == 0 ? 1u << comm_.rank : ranks, float4s,
            [] { return false; }, may_scout);
    }

    // Waits until is_there() finds what this rank's host writes: see Waiter::await_host().
    template <class IsThere>
    KCCL_DECODE void await_host(IsThere is_there) {
        waiter_.await_host(token_step_, is_there);
    }

    // Waits for a float4 of each block of all ranks. These lie as [rank][block] from slot `first`
    // on. float4s[i] becomes float4 number thread() + i * warp size. Bit i of the result tells
    // whether that one exists; the last one may not. Called by all threads of a warp.
    static constexpr uint32_t kOfAll = ceil_div(S::kWorldSize * S::kBlocks, platform::kWarpSize);
    template <bool SCOUTS = true>
    KCCL_DECODE uint32_t await_all(uint32_t first, uint32_t tag, Float4 (&float4s)[kOfAll]) {
        uint32_t slots[kOfAll], wanted = 0;
        KCCL_UNROLL
        for (uint32_t k = 0; k < kOfAll; ++k) {
            const uint32_t at = thread() + k * platform::kWarpSize;
            const bool is_there = at < S::kWorldSize * S::kBlocks;
            wanted |= is_there ? 1u << k : 0;
            slots[k] = first + (is_there ? at : 0);
        }
        await<kReach, SCOUTS>(slots, wanted, tag, float4s, (1u << S::kWorldSize) - 1);
        return wanted;
    }

    // ---- Messages -------------------------------------------------------------------------------

    // Waits until shared().landed has the sums of the messages that the next receiving module adds.
    // The collecting warp (collect.cuh) ends this wait even when its own waits have failed, and
    // reports that. So this wait needs no timeout.
    KCCL_DECODE void await_landed() {
        if constexpr (!S::kOverlaps) arrive_together(&shared_.was_read);
        while (platform::warp_any(!mem::has_completed(&shared_.has_landed, landed_parity_))) {
            mem::poll_pause();
        }
        landed_parity_ ^= 1u;
        if (mem::load_plain(&shared_.landed_failed) != 0) waiter_.fail();
    }

    // Allows the collecting warp to overwrite the sums in shared().landed.
    KCCL_DECODE void let_landed_go() {
        if constexpr (S::kOverlaps) arrive_together(&shared_.was_read);
    }

    // ---- Where nothing overlaps (S::kOverlaps) --------------------------------------------------

    // Makes all blocks of all ranks wait for each other. Called behind each op; does nothing in a
    // kernel where ops overlap. If a wait fails, the next meet() returns false.
    KCCL_DECODE void meet_all() {
        if constexpr (!S::kOverlaps) {
            mem::finish_stores();
            if (!meet()) waiter_.fail();
            if (warp_index() == 0) {
                const uint32_t tag = tag_of_end(num_meetings_);
                const uint32_t first = Slots<S>::meeting(num_meetings_);
                if (leads(warp())) {
                    mem::fence<mem::Order::kRelease, kReach>();
                    publish_to_all(first + comm_.rank * S::kBlocks + block(), Float4{}, tag);
                }
                Float4 float4s[kOfAll];
                (void)await_all(first, tag, float4s);
                mem::fence<mem::Order::kAcquire, kReach>();
            }
            ++num_meetings_;
            if (!meet()) waiter_.fail();
        }
    }

    // Ends the meetings of a token step. Slots and tags repeat after four meetings
    // (exchange_buffer.cuh). So each token step makes a multiple of four of them, and the next
    // token step begins with the same slot and tag.
    KCCL_DECODE void end_meetings() {
        while (!S::kOverlaps && num_meetings_ % 4 != 0) meet_all();
    }

    // This thread's float4s of the residual: own_rows() in own_rows.cuh says which they are.
    Float4 residual[Dims::kOwnFloat4s];

  private:
    const DeviceComm& comm_;
    const Task& task_;
    Shared<S>& shared_;
    Weights<S> weights_;
    Meeting<S::kWarps> meeting_;
    Waiter<S> waiter_;
    Delays<S> delays_;
    uint32_t token_step_;
    // With more than one column: how often each was used; this token step's first position, number
    // of positions, and id; and what end_columns() was told.
    Uses uses_;
    uint32_t position_ = 0;
    uint32_t num_columns_ = 1;
    int32_t token_ = 0;
    uint32_t num_kept_ = 1;
    uint32_t num_next_ = 1;
    uint32_t op_ = 0;
    uint32_t traced_op_ = 0;
    uint32_t traced_stage_ = 0;
    uint32_t landed_parity_ = 0;
    uint32_t num_meetings_ = 0;
};

// Adds up a value over a warp, in a fixed order. All threads get the sum.
KCCL_DECODE float sum_of_warp(float value) {
    return platform::reduce_lanes<platform::kWarpSize>(value,
                                                       [](float a, float b) { return a + b; });
}

}  // namespace kccl::decode
