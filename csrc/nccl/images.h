// The compiled kernels that this library carries, and those of them that a device has loaded.
#pragma once

#include <cstdint>
#include <map>
#include <utility>

#include "../include/kccl/host_team.hpp"

namespace kccl::nccl {

// Two communicators may make their calls in different orders on two ranks. So many calls must have
// room on a device at once, or each waits for the other.
constexpr int kAtOnce = 2;

// A kernel on a device.
struct Loaded {
    uint64_t function;
    uint32_t most_threads;  // of a block of which a multiprocessor runs kAtOnce at once
};

// KcclKernel and KcclDtype.
using KernelKey = std::pair<uint32_t, uint32_t>;

// Loads on the current device what calls of a number of ranks may need, so that no call loads
// anything: a load may wait for kernels that wait for a peer. Throws host::Error.
std::map<KernelKey, Loaded> load_kernels(const host::Team& team, int world_size);

}  // namespace kccl::nccl
