// grid_sync: the blocks of this rank's kernel wait for each other, call.count times. No peer takes
// part. See grid.cuh.
#pragma once

#include "../grid.cuh"

namespace kccl {

// Makes `count` barriers of all blocks of the kernel, one after the other; each orders memory as
// acquire and release. Called by all threads of all blocks. Returns the status of the first barrier
// that fails, else ok.
KCCL_DEVICE Status grid_sync(const DeviceComm& comm, uint64_t count) {
    GridBarrierOf<kKcclGridSyncs> barrier(comm);
    Status status = kKcclOk;
    for (uint64_t i = 0; i < count && status == kKcclOk; ++i) status = barrier.sync();
    return status;
}

namespace kernels {

KCCL_KERNEL void grid_sync(KCCL_KERNEL_PARAM(KcclCall) parameter) {
    const KcclCall& call = platform::first_parameter(parameter);
    mem::await_kernels_before();
    kccl::grid_sync(call.comm, call.count);
}

}  // namespace kernels
}  // namespace kccl
