// barrier, direct: every rank writes its epoch into every peer's window and polls its own.
// One crossing; (world_size - 1) words out.
#pragma once

#include "../include/kccl/channel.cuh"

namespace kccl {

// Called by all threads of the coop. Acquire-release: what any rank's coop wrote before, puts
// included, is visible to every rank's coop after.
template <class Coop>
KCCL_DEVICE Status barrier_direct(Coop coop, const Call& call) {
    Channel channel(call);
    const Status entered = channel.next(coop, Exchange::kPairwise);
    if (entered != kKcclOk) return entered;
    arrive<mem::Order::kRelease>(coop, call, kKcclFlagBarrier, channel.epoch());
    return await<mem::Order::kAcquire>(coop, call, kKcclFlagBarrier, channel.epoch());
}

namespace kernels {

KCCL_KERNEL void barrier_direct(KCCL_KERNEL_PARAM(KcclCall) call) {
    kccl::barrier_direct(block(), call);
}

}  // namespace kernels
}  // namespace kccl
