// The compiled kernels that this library carries, and those of them that a device has loaded.
#pragma once

#include <cstdint>
#include <map>
#include <utility>

#include "../include/kccl/host_team.hpp"

namespace kccl::nccl {

// A kernel on a device.
struct Loaded {
    uint64_t function;
    uint32_t most_threads;  // that a block may have
    uint32_t most_blocks;   // of that size that are on the device at once
};

// KcclKernel and KcclDtype.
using KernelKey = std::pair<uint32_t, uint32_t>;

// Loads on the current device what calls of a number of ranks may need, so that no call loads
// anything: a load may wait for kernels that wait for a peer. Throws host::Error.
std::map<KernelKey, Loaded> load_kernels(const host::Team& team, int world_size);

}  // namespace kccl::nccl
