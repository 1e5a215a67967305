// The warps of a block in prefill: consumer warps, which compute, and a producer warp, which waits
// for other blocks and copies vectors from the exchange buffer.
//
// Blocks hand vectors over by numbered steps (prefill_shape.cuh). A block writes its rows with
// plain stores; its warps meet; one thread makes a release fence and stores the step's number. In a
// block that needs the rows, the producer warp polls for the number, makes an acquire fence, and
// lets its consumer warps go on. The numbers only grow.
//
// A vector has one slot, not two that take turns. Before a block writes a slot again, it has waited
// for a later step of all blocks that read the slot: those of its squad, or, for messages and for
// what experts give, the blocks with its rows on all ranks (prefill_shape.cuh), or all blocks at
// the end of the pass.
#pragma once

#include "delays.cuh"
#include "prefill_shape.cuh"
#include "product.cuh"

namespace kccl::decode {

// A chunk: neighbouring positions of a prompt, which a squad runs together (prefill_shape.cuh).
struct PromptChunk {
    uint32_t number;  // counts the passes of all requests
    uint32_t first;   // the first position
    uint32_t num;     // how many positions: S::kChunk, in the last chunk perhaps fewer; 0: the
                      // block belongs to no squad of the pass
};

// The positions of a pass, in the last one perhaps fewer.
template <class S>
constexpr uint32_t kPassPositions = S::kChunk * S::kSquads;

// The squads of a pass.
struct Squads {
    uint32_t num;
    uint32_t blocks;  // of each squad, in each lane group
};

// The memory scope of what all ranks share.
template <class S>
constexpr mem::Scope kReach = S::kWorldSize == 1 ? mem::Scope::kDevice : mem::Scope::kSystem;

// What the producer warp and the consumer warps have in common.
template <class S>
class PrefillWarp {
  public:
    using Dims = Shape<S>;

    KCCL_DECODE PrefillWarp(const DeviceComm& comm, const Task& task, PrefillShared<S>& shared)
        : comm_(comm), task_(task), shared_(shared) {}

    KCCL_DECODE const DeviceComm& comm() const { return comm_; }
    KCCL_DECODE const Task& task() const { return task_; }
    KCCL_DECODE PrefillShared<S>& shared() const { return shared_; }
    KCCL_DECODE uint32_t block() const { return platform::block_in_grid(); }
    KCCL_DECODE uint32_t lane_group() const { return Dims::lane_group_of(block()); }
    KCCL_DECODE uint32_t block_in_group() const { return Dims::block_in_group_of(block()); }
    // first_lane_here() returns the number of the lane group's first lane among this rank's lanes,
    // first_lane() its number among the lanes of all ranks.
    KCCL_DECODE uint32_t first_lane_here() const { return lane_group() * Dims::kLanesPerGroup; }
    KCCL_DECODE uint32_t first_lane() const {
        return Dims::first_lane_of(comm_.rank) + first_lane_here();
    }
    KCCL_DECODE Float4* in_exchange_buffer(int rank, uint32_t slot) const {
        return reinterpret_cast<Float4*>(task_.exchange_buffers[rank]) + slot;
    }
    // Returns where a slot of the block's squad is: kResidual or one behind it.
    KCCL_DECODE Float4* here(uint32_t slot) const {
        return in_exchange_buffer(comm_.rank, slot + squad() * ChunkLayout<S>::kOfSquad);
    }

    // Begins a pass, which has the request's positions from `first` on. Returns the chunk of the
    // block's squad.
    KCCL_DECODE PromptChunk join(uint32_t number, uint32_t first) {
        const uint32_t num = least_of(task_.num_ids - first, kPassPositions<S>);
        if constexpr (!kHasSquads<S>) return {number, first, num};
        const uint32_t squads = ceil_div(num, S::kChunk);
        squads_ = {squads, Dims::kBlocksPerGroup / squads};
        squad_ = block_in_group() / squads_.blocks;
        const uint32_t before = squad_ * S::kChunk;
        return {number, first + before, before < num ? least_of(num - before, S::kChunk) : 0};
    }
    // squad() returns the number of the block's squad, block_in_squad() the block's number in it,
    // and squad_blocks() the number of the squad's blocks in this lane group.
    KCCL_DECODE uint32_t squad() const { return kHasSquads<S> ? squad_ : 0; }
    KCCL_DECODE uint32_t squad_blocks() const {
        return kHasSquads<S> ? squads_.blocks : Dims::kBlocksPerGroup;
    }
    KCCL_DECODE uint32_t block_in_squad() const {
        return block_in_group() - squad() * squad_blocks();
    }
    // Returns the number of the lane group's blocks that belong to a squad of the pass.
    KCCL_DECODE uint32_t num_busy() const {
        return kHasSquads<S> ? squads_.num * squads_.blocks : Dims::kBlocksPerGroup;
    }
    // Returns which row tiles of a product the block has.
    template <class M>
    KCCL_DECODE Cut tiles() const {
        if constexpr (!kHasSquads<S>) return M::tiles_of(block_in_group());
        return cut(M::kTiles, block_in_squad(), squad_blocks());
    }
    KCCL_DECODE uint32_t* done(int rank, uint32_t of_rank, uint32_t of_block) const {
        return reinterpret_cast<uint32_t*>(in_exchange_buffer(rank, ChunkLayout<S>::kDone)) +
               of_rank * S::kBlocks + of_block;
    }

    KCCL_DECODE uint32_t* given_up(int rank, uint32_t chunk, uint32_t of_rank) const {
        return reinterpret_cast<uint32_t*>(in_exchange_buffer(rank, ChunkLayout<S>::kGivenUp)) +
               (chunk & 1u) * S::kWorldSize + of_rank;
    }

  private:
    const DeviceComm& comm_;
    const Task& task_;
    PrefillShared<S>& shared_;
    Squads squads_ = {};
    uint32_t squad_ = 0;
};

// A consumer warp, which computes.
template <class S>
class PrefillConsumer : public PrefillWarp<S> {
  public:
    static constexpr uint32_t kThreads = S::kChunkWarps * platform::kWarpSize;

    KCCL_DECODE PrefillConsumer(const DeviceComm& comm, const Task& task, PrefillShared<S>& shared)
        : PrefillWarp<S>(comm, task, shared),
          vectors_(shared.ring, comm),
          meeting_(shared.met),
          delays_(comm.rank) {}

    KCCL_DECODE uint32_t warp_index() const {
        return mem::forget(platform::thread_in_block() / platform::kWarpSize);
    }
    // Returns this thread's number among the threads of the consumer warps.
    KCCL_DECODE uint32_t index() const { return mem::forget(platform::thread_in_block()); }
    KCCL_DECODE Consumer<VectorRing<S>>& vectors() { return vectors_; }

    // Waits until all consumer warps of the block have called this.
    KCCL_DECODE void meet() { (void)meeting_.meet(false); }

    // Waits until the producer warp has seen that the other blocks have written what this block
    // reads next. Returns false if the producer warp has given up instead.
    KCCL_DECODE bool is_ready() {
        const uint32_t phase = ready_parity_;
        await(&this->shared().ready, &ready_parity_);
        return mem::load_plain(&this->shared().stops[phase]) == kNoStop;
    }
    // Tells whether the producer warp has given up because the request was cancelled. Called after
    // is_ready().
    KCCL_DECODE bool is_given_up() const {
        return mem::load_plain(&this->shared().stops[ready_parity_ ^ 1u]) == kRequestOver;
    }

    // If this rank's host has cancelled the request, block 0 tells the producer warps of all ranks,
    // by a word in ChunkLayout::kGivenUp. The other blocks do nothing. Called before finish()
    // announces the chunk's end, which orders these stores.
    KCCL_DECODE void look_at_host(uint32_t chunk) {
        if (this->block() != 0 || !leads(whole_block())) return;
        const Task& task = this->task();
        const auto* const mailbox = reinterpret_cast<const Mailbox*>(task.mailbox);
        const uint32_t cancelled =
            mem::load<mem::Order::kRelaxed, mem::Scope::kSystem>(&mailbox->cancelled);
        if (cancelled != task.number) return;
        const int rank = this->comm().rank;
        for (int to = 0; to < static_cast<int>(S::kWorldSize); ++to) {
            mem::store<mem::Order::kRelaxed, kReach<S>>(this->given_up(to, chunk, rank),
                                                        task.number);
        }
    }

    // Announces to the blocks of this rank, or of all ranks if tells_all, that this block has done
    // a step. Called by all consumer warps, and waits until all of them have called it.
    KCCL_DECODE void finish(uint32_t number, bool tells_all) {
        delays_.wait();
        // Other blocks read vectors by asynchronous copies, which see this thread's plain stores in
        // order only behind this fence.
        mem::fence_copies();
        mem::finish_stores();
        meet();
        if (!leads(whole_block())) return;
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
    // Returns the block as a group of threads. It is not called block(), because that would hide
    // PrefillWarp::block().
    KCCL_DECODE static Block whole_block() { return kccl::block(); }

    // Waits for the end of a barrier's phase, and moves on to the next phase's parity. It needs no
    // timeout: a producer warp whose wait has failed still ends the phase, and reports the failure
    // in `stops`.
    KCCL_DECODE static void await(const mem::CopyBarrier* barrier, uint32_t* parity) {
        while (platform::warp_any(!mem::has_completed(barrier, *parity))) mem::poll_pause();
        *parity ^= 1u;
    }

    Consumer<VectorRing<S>> vectors_;
    Meeting<S::kChunkWarps> meeting_;
    Delays<S> delays_;
    uint32_t ready_parity_ = 0;
};

// The producer warp, which waits and copies. Its functions that wait return false once a wait has
// failed, and then no longer wait.
template <class S>
class PrefillProducer : public PrefillWarp<S> {
  public:
    using Dims = Shape<S>;

    KCCL_DECODE PrefillProducer(const DeviceComm& comm, const Task& task, PrefillShared<S>& shared)
        : PrefillWarp<S>(comm, task, shared), vectors_(shared.ring, comm) {}

    // Waits until all blocks of this block's squad have done a step.
    KCCL_DECODE bool await_squad(uint32_t number) {
        return await_blocks(number, this->squad() * this->squad_blocks(), this->squad_blocks());
    }
    // Waits until the blocks of all squads of this block's lane group have done a step.
    KCCL_DECODE bool await_lane_group(uint32_t number) {
        return await_blocks(number, 0, this->num_busy());
    }

    // Waits until the blocks that have the same rows as this one, in all lane groups of all ranks,
    // have done a step.
    KCCL_DECODE bool await_row(uint32_t number) {
        constexpr uint32_t kNum = S::kWorldSize * Dims::kLaneGroups;
        return await<kReach<S>>(number, kNum, [&](uint32_t i) {
            return i / Dims::kLaneGroups * S::kBlocks +
                   Dims::block_of(i % Dims::kLaneGroups, this->block_in_group());
        });
    }

    // Waits until all blocks of all ranks have done a step.
    KCCL_DECODE bool await_all(uint32_t number) {
        return await<kReach<S>>(number, S::kWorldSize * S::kBlocks, [](uint32_t i) { return i; });
    }

    // Tells whether the host of any rank had cancelled the request by the end of a chunk. Called
    // when all blocks have announced the end of that chunk.
    KCCL_DECODE bool was_given_up(uint32_t chunk) const {
        const uint32_t from = warp().index() < S::kWorldSize ? warp().index() : 0;
        const uint32_t request = mem::load<mem::Order::kRelaxed, kReach<S>>(
            this->given_up(this->comm().rank, chunk, from));
        return platform::warp_any(request == this->task().number);
    }

    // Lets the consumer warps go on, or stops them. Returns false if it stops them, because a wait
    // has failed or the request is given up.
    KCCL_DECODE bool let_go(bool is_given_up = false) {
        const uint32_t stop = has_failed_ ? kWaitFailed : is_given_up ? kRequestOver : kNoStop;
        if (stop != kNoStop && leads(warp())) {
            mem::store_plain(&this->shared().stops[ready_parity_], stop);
        }
        ready_parity_ ^= 1u;
        warp().sync();
        if (leads(warp())) mem::arrive(&this->shared().ready);
        return stop == kNoStop;
    }

    // Copies a product's vectors from the exchange buffer through the ring to the consumer warps,
    // as often as these multiply them (prefill_product.cuh). slot: of the vectors. num_tiles: the
    // row tiles of whole rounds, and perhaps of the last one.
    template <class M>
    KCCL_DECODE void copy(uint32_t slot, uint32_t num_tiles) {
        constexpr uint32_t kRound = ChunkPlan<S, M>::kTilesOfRound;
        mem::fence_copies();
        if constexpr (!kHasSquads<S>) return copy_round<M>(slot, num_tiles);
        for (uint32_t before = 0; before < num_tiles; before += kRound) {
            copy_round<M>(slot, least_of(num_tiles - before, kRound));
        }
    }

    KCCL_DECODE void drain() { vectors_.drain(); }

  private:
    // Waits until `num` blocks of this block's lane group have done a step.
    KCCL_DECODE bool await_blocks(uint32_t number, uint32_t first, uint32_t num) {
        const uint32_t lane_group = this->lane_group();
        return await<mem::Scope::kDevice>(number, num, [&](uint32_t i) {
            return uint32_t(this->comm().rank) * S::kBlocks + Dims::block_of(lane_group, first + i);
        });
    }

    template <class M>
    KCCL_DECODE void copy_round(uint32_t slot, uint32_t num_tiles) {
        using Plan = ChunkPlan<S, M>;
        constexpr uint32_t kBytes = Plan::kRun * ChunkLayout<S>::kStripe * sizeof(StagedFloat4);
        const uint32_t num_items = ceil_div(num_tiles, Plan::kRows) * Plan::kParts;
        for (uint32_t lane = 0; lane < M::kLanes; ++lane) {
            const auto* const vector = reinterpret_cast<const uint8_t*>(this->here(slot)) +
                                       uint64_t{lane} * Plan::kRuns * kBytes;
            for (uint32_t i = 0; i < num_items; i += S::kChunkWarps) {
                for (uint32_t run = 0; run < Plan::kRuns; ++run) {
                    // Tries again until a stage is free. No timeout is needed, because the consumer
                    // warps take all copies.
                    while (!vectors_.try_push(vector + run * kBytes, kBytes, S::kChunkStages)) {
                        mem::poll_pause();
                    }
                }
            }
        }
    }

    // Waits until `num` blocks have done a step. index_of(i) returns the number of the i-th of
    // them, counted over all ranks.
    template <mem::Scope SCOPE, class IndexOf>
    KCCL_DECODE bool await(uint32_t number, uint32_t num, IndexOf index_of) {
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
    // The parity of the next phase of `ready`. Between two phases this block does a step, for which
    // the producer warp waits. So the producer warp is at most one phase ahead of the consumer
    // warps.
    uint32_t ready_parity_ = 0;
};

}  // namespace kccl::decode
