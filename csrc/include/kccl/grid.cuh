// grid_sync: the blocks of one rank's kernel wait for each other. No peer takes part.
//
// Each block has a word in a line of its own, because lines that many blocks poll must not be shared:
// how often it has synchronised, as an epoch. It stores its next epoch and polls the words of all.
// The epoch is the word's last value and one more, in device memory, so that graphs replay.
//
// A kernel of fewer blocks than the one before, or of more, finds all words level: in every sync the
// blocks also bring the words of absent blocks, up to kKcclMaxBlocks, to the new epoch. Nobody polls
// those before the kernel ends. So no word is ever more than one sync behind another, and epochs may
// wrap.
#pragma once

#include "signal.cuh"

namespace kccl {

KCCL_DEVICE_COLD Status refuse_grid(const DeviceComm& comm, uint32_t num_blocks) {
    give_up(comm, Record{kKcclGridTooLarge, comm.rank, comm.rank, kKcclGridSync, 0, num_blocks,
                         kKcclMaxBlocks, 0, 0});
    return status_of(comm);
}

// Called by all threads of all blocks of a kernel. The blocks, at most kKcclMaxBlocks, are all
// resident, and no other kernel of this rank's communicator calls it meanwhile.
//
// kAcqRel: what any thread of the kernel wrote before is visible to every thread after.
// kRelaxed: every block has arrived, and nothing else is ordered; for data with flags of its own.
// All threads of a block get the same status. When it is not ok, other blocks may have gone on.
template <mem::Order order = mem::Order::kAcqRel>
KCCL_DEVICE Status grid_sync(const DeviceComm& comm) {
    static_assert(order == mem::Order::kAcqRel || order == mem::Order::kRelaxed,
                  "a sync orders both ways or not at all");
    constexpr bool kOrders = order == mem::Order::kAcqRel;
    constexpr mem::Order kArrive = kOrders ? mem::Order::kRelease : mem::Order::kRelaxed;
    // Words that a thread has on their way before it looks at the first.
    constexpr uint32_t kWords = 4;
    const Block coop = block();
    const uint32_t num_blocks = platform::blocks_per_grid();
    const uint32_t mine = platform::block_in_grid();
    if (num_blocks > kKcclMaxBlocks) return refuse_grid(comm, num_blocks);

    const Status status = status_of(comm);
    const uint32_t epoch =
        mem::load<mem::Order::kRelaxed, mem::Scope::kDevice>(grid_word(comm, mine)) +
        comm.epoch_step;
    if (coop.any(status != kKcclOk)) return status_of(comm);
    if (num_blocks == 1) return kKcclOk;
    platform::enter_call(comm.state, kKcclGridSync, 0, epoch);
    if (leads(coop)) {
        mem::store<kArrive, mem::Scope::kDevice>(grid_word(comm, mine), epoch);
    }
    const uint32_t stride = num_blocks * coop.size();
    for (uint32_t absent = num_blocks * (1 + coop.index()) + mine; absent < kKcclMaxBlocks;
         absent += stride) {
        mem::store<mem::Order::kRelaxed, mem::Scope::kDevice>(grid_word(comm, absent), epoch);
    }

    bool failed = false;
    for (uint32_t first = 0; first < num_blocks && !failed; first += kWords * coop.size()) {
        const uint32_t next = first + coop.index();
        uint32_t missing;
        uint32_t late_seen;
        uint32_t late_block;
        Wait wait(comm, kKcclGridSync, 0, epoch);
        do {
            uint32_t seen[kWords];
            for (uint32_t k = 0; k < kWords; ++k) {
                const uint32_t other = next + k * coop.size();
                seen[k] = epoch;
                if (other >= num_blocks) continue;
                seen[k] =
                    mem::load<mem::Order::kRelaxed, mem::Scope::kDevice>(grid_word(comm, other));
            }
            missing = 0;
            late_seen = 0;
            late_block = 0;
            for (uint32_t k = 0; k < kWords; ++k) {
                if (has_reached(seen[k], epoch)) continue;
                missing = 1u << comm.rank;
                late_seen = seen[k];
                late_block = next + k * coop.size();
            }
        } while (wait.again(missing, late_seen, static_cast<int32_t>(late_block)));
        failed = wait.failed();
    }
    if constexpr (kOrders) {
        for (uint32_t other = coop.index(); other < num_blocks; other += coop.size()) {
            (void)mem::load<mem::Order::kAcquire, mem::Scope::kDevice>(grid_word(comm, other));
        }
    }
    return coop.any(failed) ? status_of(comm) : kKcclOk;
}

}  // namespace kccl
