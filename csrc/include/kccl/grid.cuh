// grid_sync: the blocks of one rank's kernel wait for each other. No peer takes part.
//
// Every block adds to a counter once in each sync. One warp of each block polls the counters, one
// thread each. Only one warp polls, because the polls of 132 blocks load the memory that they wait
// for. On NVIDIA's GPUs there is one counter, because several are no faster (bench/LOG.md). On
// AMD's there is one for each die, as the topology's placement says (comm.grid_counters). Blocks
// use them in turn, in the order in which the hardware gives blocks to its dies. By estimate
// (bench/LOG.md), the atomics of 256 blocks on one word are a third of a barrier. In a sync all
// counters advance by the same number, although they may have unequal numbers of blocks: the first
// block of each counter adds what the others leave. On AMD's GPUs a thread also polls several times
// before its wait pauses and checks its timeout, because a poll that comes just too early costs the
// barrier the time of a poll. Dies have no leaders that tell each other of arrivals, because each
// hop would go through memory (bench/LOG.md).
//
// Each block also has a GridCount in a line of its own: how often it has synchronised, as an epoch,
// and the counter's value at that sync. The same block of the next kernel goes on counting from it,
// so graphs can be replayed. A block that has waited long stores its count too. A timeout can then
// name the missing block. A sync without a long wait stores nothing.
//
// The next kernel may have fewer blocks, or more. So at the end the blocks also store their own
// count for the absent blocks, up to kKcclMaxBlocks. Nobody reads those before the kernel ends. The
// epoch and the counter's value wrap, but no block is ever more than one sync ahead of another.
#pragma once

#include "refuse.cuh"

namespace kccl {

KCCL_DEVICE_COLD Status refuse_grid(const DeviceComm& comm, uint32_t kernel, uint32_t num_blocks) {
    give_up(comm, Record{kKcclGridTooLarge, comm.rank, comm.rank, kernel, 0, num_blocks,
                         kKcclMaxBlocks, 0, 0});
    return status_of(comm);
}

KCCL_DEVICE_COLD void refuse_second(const DeviceComm& comm, uint32_t kernel) {
    give_up(comm, Record{kKcclOpenedTwice, comm.rank, comm.rank, kernel, 0, 2, 1, 0, 0});
}

// Returns true if this thread leads its block and the block has `what` open (see open_mark()); then
// the communicator has failed. An open barrier or exchange counts in registers, so a second one
// would count the same steps again. `kernel`: for the record.
KCCL_DEVICE bool is_second(const DeviceComm& comm, uint32_t what, KcclKernel kernel) {
    if (!leads(block())) return false;
    const uint32_t* mark = open_mark(comm, what, platform::block_in_grid());
    if (mem::load<mem::Order::kRelaxed, mem::Scope::kDevice>(mark) == 0) return false;
    refuse_second(comm, kernel);
    return true;
}

// Stores whether this block has `what` open. Only the leader uses the mark, so it needs no sync.
KCCL_DEVICE void mark_open(const DeviceComm& comm, uint32_t what, bool is_open) {
    if (!leads(block())) return;
    mem::store<mem::Order::kRelaxed, mem::Scope::kDevice>(
        open_mark(comm, what, platform::block_in_grid()), is_open ? 1u : 0u);
}

// A block's count of its own syncs.
struct GridCount {
    uint32_t epoch;
    uint32_t total;  // each counter's value when all blocks have reached `epoch`
};

KCCL_DEVICE GridCount load_count(const DeviceComm& comm, KcclGridWords family, uint32_t block) {
    const uint64_t both = mem::load<mem::Order::kRelaxed, mem::Scope::kDevice>(
        reinterpret_cast<const uint64_t*>(grid_line(comm, family, block)));
    return {static_cast<uint32_t>(both), static_cast<uint32_t>(both >> 32)};
}

KCCL_DEVICE void store_count(const DeviceComm& comm, KcclGridWords family, uint32_t block,
                             GridCount count) {
    mem::store<mem::Order::kRelaxed, mem::Scope::kDevice>(
        reinterpret_cast<uint64_t*>(grid_line(comm, family, block)),
        uint64_t{count.total} << 32 | count.epoch);
}

// Finds a block for the record of a wait that fails. Stores that this block has reached `count`.
// Returns a block that has not stored the same, among the blocks first, first + kWarpSize, ... <
// num_blocks.
KCCL_DEVICE_COLD Missing find_absent(const DeviceComm& comm, KcclGridWords family, uint32_t first,
                                     uint32_t num_blocks, GridCount count) {
    const uint32_t mine = platform::block_in_grid();
    if (first == 0 && load_count(comm, family, mine).epoch != count.epoch) {
        store_count(comm, family, mine, count);
    }
    for (uint32_t i = first; i < num_blocks; i += platform::kWarpSize) {
        if (!has_reached(load_count(comm, family, i).epoch, count.epoch)) {
            // Block i has not reached `count`, only the sync before it: it is missing.
            return {1u << comm.rank, count.epoch - comm.epoch_step, static_cast<int32_t>(i)};
        }
    }
    return {0, count.epoch, -1};
}

// A barrier of the blocks of a kernel. Only its opening is expensive, so it is opened once for many
// syncs. All threads of all blocks open it, make the same syncs and let it end. The blocks, at most
// kKcclMaxBlocks, must all be resident at the same time.
//
// An open barrier counts in registers. So barriers that are open at the same time need words of
// their own: a FAMILY each.
template <KcclGridWords FAMILY>
class GridBarrierOf {
  public:
    // `comm` must outlive this object.
    KCCL_DEVICE explicit GridBarrierOf(const DeviceComm& comm)
        : comm_(comm), num_blocks_(platform::blocks_per_grid()), counters_(comm.grid_counters) {
        if (num_blocks_ > kKcclMaxBlocks) {
            status_ = refuse_grid(comm, kKcclGridSync, num_blocks_);
            return;
        }
        if constexpr (kIsMarked) {
            begin_together<CoopKind::kGrid>(comm, "GridBarrier", {{"blocks", num_blocks_}});
        }
        polled_ = mem::keep(counter(block().index()));
        own_ = kMostCounters == 1 ? polled_ : counter(platform::block_in_grid());
        step_ = mem::keep(comm.epoch_step);
        // Each block adds step_, so that the counter wraps as early as epochs do in tests that
        // shorten them. But it adds at most so much that counters stay comparable.
        weight_ = mem::keep(step_ < kMostLead / num_blocks_ ? step_ : kMostLead / num_blocks_);
        added_ = kMostCounters == 1 ? weight_ : share_of(platform::block_in_grid());
        const Status status = status_of(comm);
        count_ = load_count(comm, FAMILY, platform::block_in_grid());
        const bool second = kIsMarked && is_second(comm, kMark, kKcclGridSync);
        // The vote also separates the reads here from the writes of the first sync.
        if (block().any(status != kKcclOk || second)) status_ = status_of(comm);
        if (kIsMarked && status_ == kKcclOk) mark_open(comm, kMark, true);
    }

    KCCL_DEVICE ~GridBarrierOf() {
        if (status_ != kKcclOk) return;
        if (kIsMarked) mark_open(comm_, kMark, false);
        if (num_blocks_ == 1) return;
        const uint32_t mine = platform::block_in_grid();
        if (leads(block())) store_count(comm_, FAMILY, mine, count_);
        const uint32_t stride = num_blocks_ * block().size();
        for (uint32_t absent = num_blocks_ * (1 + block().index()) + mine; absent < kKcclMaxBlocks;
             absent += stride) {
            store_count(comm_, FAMILY, absent, count_);
        }
        block().sync();
    }

    GridBarrierOf(const GridBarrierOf&) = delete;
    GridBarrierOf& operator=(const GridBarrierOf&) = delete;

    // Waits until all blocks have called it. Called by all threads of all blocks. kAcqRel: what any
    // thread of the kernel wrote before is visible to every thread after. kRelaxed: orders no
    // memory; for data that carries its own flags. All threads of a block get the same status. When
    // it is not ok, other blocks may have gone on.
    template <mem::Order order = mem::Order::kAcqRel>
    KCCL_DEVICE Status sync() {
        static_assert(order == mem::Order::kAcqRel || order == mem::Order::kRelaxed,
                      "a sync orders both ways or not at all");
        constexpr bool kOrders = order == mem::Order::kAcqRel;
        constexpr mem::Order kArrive = kOrders ? mem::Order::kRelease : mem::Order::kRelaxed;
        const Block coop = block();
        if constexpr (kIsMarked) {
            begin_together<CoopKind::kGrid>(comm_, "GridBarrier::sync", {{"blocks", num_blocks_}});
        }
        if (status_ != kKcclOk) return status_;
        if (num_blocks_ == 1) {
            if constexpr (kOrders) coop.sync();
            return kKcclOk;
        }
        count_.epoch += step_;
        count_.total += per_sync();
        platform::enter_call(comm_.state, kKcclGridSync, 0, count_.epoch);
        if constexpr (kOrders) coop.sync();
        if (leads(coop)) mem::add<kArrive, mem::Scope::kDevice>(own_, added_);
        if constexpr (kMostCounters > 1) {
            // Block 0 also advances the counters beyond the number of blocks, to which no block
            // adds.
            for (uint32_t i = num_blocks_; i < counters() && platform::block_in_grid() == 0; ++i) {
                if (leads(coop)) mem::add<kArrive, mem::Scope::kDevice>(counter(i), per_sync());
            }
        }
        bool arrived = true;
        if (coop.index() < platform::kWarpSize) {
            // If there is one counter, all threads of the warp poll it, which the hardware does by
            // one load.
            const bool polls = kMostCounters == 1 || coop.index() < counters();
            const auto poll = [&] {
                bool reached = !polls;
                KCCL_UNROLL
                for (uint32_t i = 0; i < platform::kGridPolls && !reached; ++i) {
                    reached = has_reached(load_counter(), count_.total);
                }
                return reached;
            };
            const auto missing = [&] {
                return find_absent(comm_, FAMILY, coop.index(), num_blocks_, count_);
            };
            arrived = wait_until(comm_, Awaited{kKcclGridSync, 0, count_.epoch}, poll, missing);
            // The fence comes behind the polls, not in each of them, because each acquire empties
            // the L1 cache.
            if constexpr (kOrders) mem::fence<mem::Order::kAcquire, mem::Scope::kDevice>();
        }
        if (coop.any(!arrived)) status_ = status_of(comm_);
        return status_;
    }

  private:
    KCCL_DEVICE uint32_t load_counter() const {
        return mem::load<mem::Order::kRelaxed, mem::Scope::kDevice>(polled_);
    }

    // Returns the counter to which a block adds. Thread i polls counter i.
    KCCL_DEVICE uint32_t* counter(uint32_t block) const {
        constexpr uint32_t kLines = kKcclGridCounterLines / kKcclGridCounters;
        return grid_line(comm_, FAMILY, kKcclMaxBlocks + block % counters() * kLines);
    }
    // Returns the sum that all blocks add to each counter in a sync.
    KCCL_DEVICE uint32_t per_sync() const { return num_blocks_ * weight_; }
    // Returns the number that a block adds in a sync, if there are several counters.
    KCCL_DEVICE uint32_t share_of(uint32_t block) const {
        if (block >= counters()) return weight_;
        const uint32_t others = (num_blocks_ - 1 - block) / counters();
        return per_sync() - others * weight_;
    }

    static constexpr uint32_t kMostCounters = platform::kGridCounters;
    static_assert(kMostCounters == 1 || kMostCounters == kKcclGridCounters, "comm has the number");
    static_assert(kMostCounters <= platform::kWarpSize, "a thread polls each");
    KCCL_DEVICE uint32_t counters() const { return kMostCounters == 1 ? 1 : counters_; }
    // The most by which a sync advances a counter: a counter stays less than half a period (2^31)
    // away from the value that a block waits for.
    static constexpr uint32_t kMostLead = 1u << 30;
    // Only users' barriers have an open_mark(): the library's own open and close within one
    // function.
    static constexpr bool kIsMarked = FAMILY == kKcclGridBarriers;
    static constexpr uint32_t kMark = 0;

    const DeviceComm& comm_;
    const uint32_t num_blocks_;
    const uint32_t counters_;     // that blocks use; the same in all kernels of the communicator
    uint32_t* own_ = nullptr;     // the counter to which this block adds
    uint32_t* polled_ = nullptr;  // the counter that this thread polls
    uint32_t step_ = 0;
    uint32_t weight_ = 0;  // the number that a block adds, unless it is the first of its counter
    uint32_t added_ = 0;   // the number that this block adds
    GridCount count_ = {};
    Status status_ = kKcclOk;
};

// The barrier for users' kernels. While it is open, this rank's communicator may open no other one,
// in this kernel or in another: the second one fails with kKcclOpenedTwice. grid_sync() and the
// collectives by grids may be called while it is open.
using GridBarrier = GridBarrierOf<kKcclGridBarriers>;

// Opens a barrier of all blocks, makes one sync and closes it: see GridBarrierOf. Called by all
// threads of all blocks.
template <mem::Order order = mem::Order::kAcqRel>
KCCL_DEVICE Status grid_sync(const DeviceComm& comm) {
    begin_together<CoopKind::kGrid>(comm, "grid_sync", {{"blocks", platform::blocks_per_grid()}});
    GridBarrierOf<kKcclGridSyncs> barrier(comm);
    return barrier.sync<order>();
}

}  // namespace kccl
