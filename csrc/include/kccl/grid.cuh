// grid_sync: the blocks of one rank's kernel wait for each other. No peer takes part.
//
// Each block has a word in a line of its own, because lines that many blocks poll must not be shared:
// how often it has synchronised, as an epoch. It stores its next epoch and polls the words of all.
// The first epoch of a kernel is the word's last value and one more, in device memory, so that graphs
// replay.
//
// A kernel of fewer blocks than the one before, or of more, finds all words level: when the blocks
// are done they also bring the words of absent blocks, up to kKcclMaxBlocks, to their last epoch.
// Nobody polls those before the kernel ends. So all words are level between kernels, no word is ever
// more than one sync behind another within one, and epochs may wrap.
#pragma once

#include "signal.cuh"

namespace kccl {

KCCL_DEVICE_COLD Status refuse_grid(const DeviceComm& comm, uint32_t kernel, uint32_t num_blocks) {
    give_up(comm, Record{kKcclGridTooLarge, comm.rank, comm.rank, kernel, 0, num_blocks,
                         kKcclMaxBlocks, 0, 0});
    return status_of(comm);
}

// The blocks of a kernel, for many syncs: opening it is what costs. All threads of all blocks open it,
// make the same syncs and let it end. The blocks, at most kKcclMaxBlocks, are all resident, and no
// other kernel of this rank's communicator does so meanwhile.
class GridBarrier {
  public:
    // `comm` outlives this. Families of words are barriers of their own.
    KCCL_DEVICE explicit GridBarrier(const DeviceComm& comm, KcclGridWords family = kKcclGridSyncs)
        : comm_(comm), num_blocks_(platform::blocks_per_grid()), family_(family) {
        if (num_blocks_ > kKcclMaxBlocks) {
            status_ = refuse_grid(comm, kKcclGridSync, num_blocks_);
            return;
        }
        mine_ = grid_word(comm, family, platform::block_in_grid());
        others_ = grid_word(comm, family, mem::keep(block().index()));
        step_ = mem::keep(comm.epoch_step);
        const Status status = status_of(comm);
        epoch_ = mem::load<mem::Order::kRelaxed, mem::Scope::kDevice>(mine_);
        // Also separates the reads here from the writes of the first sync.
        if (block().any(status != kKcclOk)) status_ = status_of(comm);
    }

    KCCL_DEVICE ~GridBarrier() {
        if (num_blocks_ == 1 || status_ != kKcclOk) return;
        const uint32_t stride = num_blocks_ * block().size();
        for (uint32_t absent = num_blocks_ * (1 + block().index()) + platform::block_in_grid();
             absent < kKcclMaxBlocks; absent += stride) {
            mem::store<mem::Order::kRelaxed, mem::Scope::kDevice>(grid_word(comm_, family_, absent),
                                                                  epoch_);
        }
    }

    GridBarrier(const GridBarrier&) = delete;
    GridBarrier& operator=(const GridBarrier&) = delete;

    // kAcqRel: what any thread of the kernel wrote before is visible to every thread after.
    // kRelaxed: every block has arrived, and nothing else is ordered; for data with flags of its own.
    // All threads of a block get the same status. When it is not ok, other blocks may have gone on.
    template <mem::Order order = mem::Order::kAcqRel>
    KCCL_DEVICE Status sync() {
        static_assert(order == mem::Order::kAcqRel || order == mem::Order::kRelaxed,
                      "a sync orders both ways or not at all");
        constexpr bool kOrders = order == mem::Order::kAcqRel;
        constexpr mem::Order kArrive = kOrders ? mem::Order::kRelease : mem::Order::kRelaxed;
        constexpr mem::Order kAwait = kOrders ? mem::Order::kAcquire : mem::Order::kRelaxed;
        const Block coop = block();
        if (status_ != kKcclOk || num_blocks_ == 1) return status_;
        epoch_ += step_;
        platform::enter_call(comm_.state, kKcclGridSync, 0, epoch_);
        if constexpr (kOrders) coop.sync();
        if (leads(coop)) mem::store<kArrive, mem::Scope::kDevice>(mine_, epoch_);
        bool arrived = true;
        // One word a thread and turn.
        for (uint32_t turn = 0; turn < num_blocks_ && arrived; turn += coop.size()) {
            const bool is_one = turn + coop.index() < num_blocks_;
            const uint32_t* word = others_ + uint64_t{turn} * (kKcclLineBytes / sizeof(uint32_t));
            uint32_t seen = epoch_;
            const auto poll = [&] {
                if (is_one) seen = mem::load<kAwait, mem::Scope::kDevice>(word);
                return has_reached(seen, epoch_);
            };
            const auto missing = [&] {
                return Missing{has_reached(seen, epoch_) ? 0 : 1u << comm_.rank, seen,
                               static_cast<int32_t>(turn + coop.index())};
            };
            arrived = wait_until(comm_, Awaited{kKcclGridSync, 0, epoch_}, poll, missing);
        }
        if (coop.any(!arrived)) status_ = status_of(comm_);
        return status_;
    }

  private:
    const DeviceComm& comm_;
    const uint32_t num_blocks_;
    const KcclGridWords family_;
    uint32_t* mine_ = nullptr;
    const uint32_t* others_ = nullptr;  // of the block whose number is this thread's
    uint32_t epoch_ = 0;
    uint32_t step_ = 0;
    Status status_ = kKcclOk;
};

// One sync; see GridBarrier.
template <mem::Order order = mem::Order::kAcqRel>
KCCL_DEVICE Status grid_sync(const DeviceComm& comm) {
    GridBarrier barrier(comm);
    return barrier.sync<order>();
}

}  // namespace kccl
