// Exchanges by publish and collect, for tests on the simulator and on GPUs. Every block keeps all
// that it collects. It also checks that it sees what the others stored before they published.
#pragma once

#include <kccl/kccl.cuh>

namespace publish_rounds {

using kccl::mem::Order;
using kccl::mem::Scope;

// in: [round][block][count] of this rank. out: [block][round][slice][count], or REDUCED over the
// ranks [block][round][block][count]. statuses: one for each block.
// boards: for each rank that takes part, a word for each slice. Before a block publishes, it stores
// the round there. late: for each thread, how many of these stores it did not see. With 0 boards
// nothing is stored.
// Block `absent` does not come to the last round: it stays away until the others have given up.
template <KcclReach REACH, bool REDUCED, Order ORDER, class T>
KCCL_KERNEL void exchanges(kccl::DeviceComm comm, const T* in, T* out, uint32_t count,
                           uint32_t rounds, uint32_t* const* boards, uint32_t num_boards,
                           uint32_t own_board, uint32_t absent, uint32_t* statuses,
                           uint32_t* late) {
    const kccl::Block coop = kccl::block();
    const uint32_t block = kccl::platform::block_in_grid();
    const uint32_t blocks = kccl::platform::blocks_per_grid();
    const uint32_t own = own_board * blocks + block;
    kccl::GridExchange<REACH> exchange(comm);
    kccl::Status status = exchange.status();
    uint32_t missing = 0;
    for (uint32_t round = 0; round < rounds && status == kKcclOk; ++round) {
        if (round + 1 == rounds && block == absent) {
            while (kccl::status_of(comm) == kKcclOk) kccl::mem::poll_pause();
            break;
        }
        // The last threads store, because these may not be the threads that publish.
        for (uint32_t i = coop.size() - 1 - coop.index(); i < num_boards; i += coop.size()) {
            uint32_t* const board = kccl::mem::load_plain(boards + i);
            kccl::mem::store<Order::kRelaxed, Scope::kSystem>(board + own, round + 1);
        }
        const T* slice = in + (uint64_t{round} * blocks + block) * count;
        const uint64_t row = uint64_t{block} * rounds + round;
        kccl::publish<ORDER>(exchange, slice, count);
        if constexpr (REDUCED) {
            T* const sums = out + row * exchange.num_blocks() * count;
            status = kccl::collect_reduced<kccl::Sum, ORDER>(exchange, sums, count);
        } else {
            T* const slices = out + row * exchange.num_slices() * count;
            status = kccl::collect<ORDER>(exchange, slices, count);
        }
        const uint32_t* notes =
            num_boards == 0 ? nullptr : kccl::mem::load_plain(boards + own_board);
        for (uint32_t i = coop.index(); num_boards != 0 && i < exchange.num_slices();
             i += coop.size()) {
            const uint32_t seen = kccl::mem::load<Order::kRelaxed, Scope::kSystem>(notes + i);
            if (seen < round + 1) ++missing;
        }
    }
    if (leads(coop)) kccl::mem::store_plain(statuses + block, static_cast<uint32_t>(status));
    kccl::mem::store_plain(late + uint64_t{block} * coop.size() + coop.index(), missing);
}

}  // namespace publish_rounds
