// Many calls in one kernel, each with the result of the one before: what a call costs inside of
// somebody's kernel.
#pragma once

#include <kccl/kccl.cuh>
#include <kccl/kernels/all_reduce_one_shot_sentinel.cuh>

namespace kccl::gcn {

// `algorithm` is called with a channel of this block, for the block's slice of x, which has `count`
// floats.
template <int WORLD_SIZE, class Algorithm>
KCCL_DEVICE void chain(const DeviceComm& comm, float* x, uint32_t count, uint32_t calls,
                       Algorithm algorithm) {
    Channel<Block, WORLD_SIZE> channel(block(), comm);
    float* const mine = x + platform::block_in_grid() * count;
    for (uint32_t i = 0; i < calls; ++i) {
        if (algorithm(channel, mine, count) != kKcclOk) return;
    }
}

template <int WORLD_SIZE>
KCCL_KERNEL_OF(512)
void chain_ll16(KCCL_KERNEL_PARAM(DeviceComm) comm, float* x, uint32_t count, uint32_t calls) {
    chain<WORLD_SIZE>(platform::first_parameter(comm), x, count, calls,
                      [](auto& channel, float* mine, uint32_t n) {
                          return all_reduce_one_shot_ll16<float, Sum>(channel, mine, mine, n);
                      });
}

template <int WORLD_SIZE>
KCCL_KERNEL_OF(512)
void chain_sentinel(KCCL_KERNEL_PARAM(DeviceComm) comm, float* x, uint32_t count, uint32_t calls) {
    chain<WORLD_SIZE>(platform::first_parameter(comm), x, count, calls,
                      [](auto& channel, float* mine, uint32_t n) {
                          return all_reduce_one_shot_sentinel<float, Sum>(channel, mine, mine, n);
                      });
}

template <mem::Order ORDER>
KCCL_KERNEL_OF(512)
void barriers(KCCL_KERNEL_PARAM(DeviceComm) comm, uint32_t calls) {
    GridBarrier barrier(platform::first_parameter(comm));
    for (uint32_t i = 0; i < calls; ++i) {
        if (barrier.sync<ORDER>() != kKcclOk) return;
    }
}

// An exchange of one element a block, on one rank.
KCCL_KERNEL_OF(512)
void exchanges(KCCL_KERNEL_PARAM(DeviceComm) comm, uint64_t* out, uint32_t calls) {
    GridExchange<kKcclReachRank> exchange(platform::first_parameter(comm));
    for (uint32_t i = 0; i < calls; ++i) {
        const uint64_t mine = i * 1000 + platform::block_in_grid();
        if (publish<mem::Order::kRelaxed>(exchange, &mine, 1) != kKcclOk) return;
        uint64_t* const all =
            out + platform::block_in_grid() * uint64_t{platform::blocks_per_grid()};
        if (collect<mem::Order::kRelaxed>(exchange, all, 1) != kKcclOk) return;
    }
}

// Exchanges between the blocks of all ranks: in: [call][block][count]. Each block collects the
// slices of all ranks' blocks, gathered: [block][slice][count] of the last call, and their sums
// over the ranks: sums: [call][block][block][count].
template <int WORLD_SIZE>
KCCL_KERNEL_OF(512)
void rank_exchanges(KCCL_KERNEL_PARAM(KcclDeviceComm) parameter, const float* in, float* gathered,
                    float* sums, uint32_t count, uint32_t calls) {
    const DeviceComm& comm = platform::first_parameter(parameter);
    GridExchange<kKcclReachAllRanks, WORLD_SIZE> exchange(comm);
    const uint64_t num_blocks = platform::blocks_per_grid();
    for (uint32_t i = 0; i < calls; ++i) {
        const uint64_t mine = i * num_blocks + platform::block_in_grid();
        if (publish(exchange, in + mine * count, count) != kKcclOk) return;
        if (collect_reduced(exchange, sums + mine * num_blocks * count, count) != kKcclOk) return;
        // A slice of one packet, so that the next slice lies elsewhere on the board.
        if (publish<mem::Order::kRelaxed>(exchange, in, 0) != kKcclOk) return;
        if (collect<mem::Order::kRelaxed>(exchange, gathered, 0) != kKcclOk) return;
    }
    const uint64_t last = (calls - 1) * num_blocks + platform::block_in_grid();
    if (publish(exchange, in + last * count, count) != kKcclOk) return;
    collect(exchange, gathered + platform::block_in_grid() * exchange.num_slices() * count, count);
}

}  // namespace kccl::gcn
