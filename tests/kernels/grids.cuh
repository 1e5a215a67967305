// Calls that all blocks of a grid make together, from one list; called as sequence.cuh's kernel.
#pragma once

#include "copies.cuh"

namespace kccl {

// Called by all threads of all blocks. KERNELS: as in sequence.cuh. `kept`: a barrier that the
// kernel keeps open, or null.
template <uint32_t KERNELS, class T, class Op>
KCCL_DEVICE Status make_grid_call(const DeviceComm& comm, const Call& call, GridBarrier* kept) {
    constexpr auto kHas = [](uint32_t kernel) { return (KERNELS >> kernel & 1u) != 0; };
    if constexpr (kHas(kKcclAllReduceOneShotLl16)) {
        if (call.kernel == kKcclAllReduceOneShotLl16) {
            return all_reduce<T, Op>(grid(), comm, output_of<T>(call), input_of<T>(call),
                                     call.count);
        }
    }
    if constexpr (kHas(kKcclReduceScatterDirectLl16)) {
        if (call.kernel == kKcclReduceScatterDirectLl16) {
            return reduce_scatter<T, Op>(grid(), comm, output_of<T>(call), input_of<T>(call),
                                         call.count);
        }
    }
    if constexpr (kHas(kKcclAllGatherDirectLl16)) {
        if (call.kernel == kKcclAllGatherDirectLl16) {
            return all_gather(grid(), comm, output_of<uint8_t>(call), input_of<uint8_t>(call),
                              call.count);
        }
    }
    if constexpr (kHas(kKcclBroadcastDirectLl16)) {
        if (call.kernel == kKcclBroadcastDirectLl16) {
            return broadcast(grid(), comm, output_of<uint8_t>(call), input_of<uint8_t>(call),
                             call.count, call.peer);
        }
    }
    if (call.kernel == kKcclBarrierDirect) return barrier(grid(), comm);
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

template <uint32_t KERNELS, class T, class Op>
KCCL_DEVICE void make_grid_calls(const DeviceComm& comm, const Call* calls, uint32_t count,
                                 GridBarrier* kept) {
    Status status = kKcclOk;
    for (uint32_t i = 0; i < count && status == kKcclOk; ++i) {
        const Call call = mem::load_plain(calls + i);
        status = make_grid_call<KERNELS, T, Op>(comm, call, kept);
    }
}

namespace kernels {

template <bool KEEPS, uint32_t KERNELS, class T, class Op>
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
