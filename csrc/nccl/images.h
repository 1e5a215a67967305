// The compiled kernels that this library carries, and those of them that a device has loaded.
#pragma once

#include <cstdint>

#include "../include/kccl/host_team.hpp"

namespace kccl::nccl {

struct Kernel;

// A kernel on a device.
struct Loaded {
    uint64_t function;
    uint32_t most_threads;  // that a block may have
};

// Loads on the current device what calls of a number of ranks may need, so that no call loads
// anything: a load may wait for kernels that wait for a peer. Throws host::Error.
void load_kernels(const host::Team& team, int world_size);

// Returns a kernel that has been loaded. dtype: KcclDtype.
Loaded loaded(const host::Team& team, const Kernel& kernel, uint32_t dtype);

}  // namespace kccl::nccl
