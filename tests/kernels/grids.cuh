// Calls that all blocks of a grid make together, from one list; called as sequence.cuh's kernel.
#pragma once

#include "made.cuh"

namespace kccl {

// A call of no collective. `kept`: a barrier that the kernel keeps open, or null.
KCCL_DEVICE Status make_other_grid_call(const DeviceComm& comm, const Call& call,
                                        GridBarrier* kept) {
    if (call.kernel == kCopy) {
        copy_by_others(block(), call);
        return kKcclOk;
    }
    if (call.kernel != kKcclGridSync) return kKcclForked;
    // No count: by the barrier that is kept open.
    if (call.count == 0) return kept->sync();
    Status status = kKcclOk;
    for (uint64_t i = 0; i < call.count && status == kKcclOk; ++i) status = grid_sync(comm);
    return status;
}

// Called by all threads of all blocks.
template <uint64_t KERNELS, class T, class Op>
KCCL_DEVICE void make_grid_calls(const DeviceComm& comm, const Call* calls, uint32_t count,
                                 GridBarrier* kept) {
    Status status = kKcclOk;
    const auto by_grid = [&](auto collective) { return collective(grid(), comm); };
    for (uint32_t i = 0; i < count && status == kKcclOk; ++i) {
        const Call call = mem::load_plain(calls + i);
        status = make_by<MadeByUsers, KERNELS, T, Op>(
            by_grid, call, [&] { return make_other_grid_call(comm, call, kept); });
    }
}

namespace kernels {

template <bool KEEPS, uint64_t KERNELS, class T, class Op>
KCCL_KERNEL void grid_sequence(KCCL_KERNEL_PARAM(KcclDeviceComm) comm, const Call* calls,
                               uint32_t count, uint32_t) {
    if constexpr (KEEPS) {
        GridBarrier barrier(comm);
        make_grid_calls<KERNELS, T, Op>(comm, calls, count, &barrier);
    } else {
        make_grid_calls<KERNELS, T, Op>(comm, calls, count, nullptr);
    }
}

}  // namespace kernels
}  // namespace kccl
