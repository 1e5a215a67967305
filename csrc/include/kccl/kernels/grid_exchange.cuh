// grid_exchange: every block of every rank publishes a slice, and every block collects all slices.
// See publish.cuh.
#pragma once

#include "../publish.cuh"

namespace kccl {

// Gives every block the slices of all blocks of all ranks. `in`: the slices of this rank's blocks,
// `count` bytes each. `out`: for each block of this rank, the slices that it has collected. Called
// by all threads of all blocks; all get the same status.
template <int WORLD_SIZE>
KCCL_DEVICE Status grid_exchange(const DeviceComm& comm, uint8_t* out, const uint8_t* in,
                                 uint32_t count) {
    GridExchange<kKcclReachAllRanks, WORLD_SIZE> exchange(comm);
    const uint32_t block = platform::block_in_grid();
    // Relaxed is enough: the packets carry their own flags, and the end of the kernel orders all
    // else.
    constexpr mem::Order kRelaxed = mem::Order::kRelaxed;
    publish<kRelaxed>(exchange, in + uint64_t{block} * count, count);
    uint8_t* mine = out + uint64_t{block} * exchange.num_slices() * count;
    // If publish() failed, collect() returns its status.
    return collect<kRelaxed>(exchange, mine, count);
}

namespace kernels {

template <int WORLD_SIZE>
KCCL_KERNEL void grid_exchange(KCCL_KERNEL_PARAM(KcclCall) parameter) {
    const KcclCall& call = platform::first_parameter(parameter);
    mem::await_kernels_before();
    kccl::grid_exchange<WORLD_SIZE>(call.comm, output_of<uint8_t>(call), input_of<uint8_t>(call),
                                    static_cast<uint32_t>(call.count));
}

}  // namespace kernels
}  // namespace kccl
