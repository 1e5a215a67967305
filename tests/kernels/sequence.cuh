// Many calls in one launch: between them nothing orders memory but the calls themselves.
#pragma once

#include <kccl/kccl.cuh>

namespace kccl {

// KERNELS: bits of the KcclKernel that the list may hold, so that no others are compiled.
template <uint32_t KERNELS>
KCCL_DEVICE constexpr bool has(KcclKernel kernel) {
    return (KERNELS >> kernel & 1u) != 0;
}

// Called by all threads of the coop. T, Op: of every reduction in the list.
template <uint32_t KERNELS, class T, class Op, class Coop>
KCCL_DEVICE Status make_call(Coop coop, const Call& call) {
    if constexpr (has<KERNELS>(kKcclAllReduceOneShotLl16)) {
        if (call.kernel == kKcclAllReduceOneShotLl16) {
            return all_reduce_one_shot_ll16<T, Op, 0>(coop, call);
        }
    }
    if constexpr (has<KERNELS>(kKcclAllReduceOneShotSentinel)) {
        if (call.kernel == kKcclAllReduceOneShotSentinel) {
            return all_reduce_one_shot_sentinel<T, Op, 0>(coop, call);
        }
    }
    if constexpr (has<KERNELS>(kKcclAllReduceOneShotPullSimple)) {
        if (call.kernel == kKcclAllReduceOneShotPullSimple) {
            return all_reduce_one_shot_pull_simple<T, Op>(coop, call);
        }
    }
    if constexpr (has<KERNELS>(kKcclBroadcastDirectLl16)) {
        if (call.kernel == kKcclBroadcastDirectLl16) return broadcast_direct_ll16(coop, call);
    }
    if constexpr (has<KERNELS>(kKcclBarrierDirect)) {
        if (call.kernel == kKcclBarrierDirect) return barrier_direct(coop, call);
    }
    if constexpr (has<KERNELS>(kKcclPut)) {
        if (call.kernel == kKcclPut) return put(coop, call);
    }
    if constexpr (has<KERNELS>(kKcclGet)) {
        if (call.kernel == kKcclGet) return get(coop, call);
    }
    if constexpr (has<KERNELS>(kKcclSignal)) {
        if (call.kernel == kKcclSignal) return signal(coop, call);
    }
    if constexpr (has<KERNELS>(kKcclWait)) {
        if (call.kernel == kKcclWait) return wait(coop, call);
    }
    if constexpr (has<KERNELS>(kKcclGridSync)) {
        if (call.kernel == kKcclGridSync) return grid_sync(call);
    }
    return kKcclForked;
}

namespace kernels {

// `calls`: `count` for each coop of the grid.
template <class Coop, uint32_t KERNELS, class T, class Op>
KCCL_KERNEL void sequence(const Call* calls, uint32_t count) {
    const Coop coop;
    const uint32_t thread =
        platform::block_in_grid() * platform::threads_per_block() + platform::thread_in_block();
    const Call* mine = calls + uint64_t(thread / coop.size()) * count;
    Status status = kKcclOk;
    for (uint32_t i = 0; i < count && status == kKcclOk; ++i) {
        const Call call = mem::load_plain(mine + i);
        status = make_call<KERNELS, T, Op>(coop, call);
    }
}

}  // namespace kernels
}  // namespace kccl
