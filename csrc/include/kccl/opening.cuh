// Checks whether a channel may be opened: its number, the block's number, and the world size that a
// template was made for.
#pragma once

#include "refuse.cuh"

namespace kccl {

template <int WORLD_SIZE>
KCCL_DEVICE bool may_open(const DeviceComm& comm, int channel, int block) {
    return !is_outside(channel, comm.num_channels) && !is_outside(block, comm.blocks_per_channel) &&
           (WORLD_SIZE == 0 || WORLD_SIZE == comm.world_size);
}

// Fails this rank because may_open() is false. Called by one thread.
template <int WORLD_SIZE>
KCCL_DEVICE_COLD void refuse_opening(const DeviceComm& comm, int channel, int block) {
    Refused why = {kKcclArgumentBlock, uint64_t(int64_t{block}), uint64_t(comm.blocks_per_channel)};
    if (is_outside(channel, comm.num_channels)) {
        why = {kKcclArgumentChannel, uint64_t(int64_t{channel}), uint64_t(comm.num_channels)};
    }
    if (WORLD_SIZE != 0 && WORLD_SIZE != comm.world_size) {
        why = {kKcclArgumentWorldSize, uint64_t{WORLD_SIZE}, uint64_t(comm.world_size)};
    }
    refuse(comm, kKcclNumKernels, channel, why);
}

}  // namespace kccl
