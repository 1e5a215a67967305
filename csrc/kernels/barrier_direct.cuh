// barrier, direct: every rank writes its epoch into every peer's window and polls its own.
// One crossing; (world_size - 1) words out.
#pragma once

#include "../include/kccl/channel.cuh"

namespace kccl {

// Called by all threads of the channel's coop; all get the same status.
//
// kAcqRel: what any rank's coop wrote before, puts included, is visible to every rank's coop after.
// kRelaxed: every rank's coop has arrived, and nothing else is ordered; for data with flags of its
// own.
template <mem::Order order = mem::Order::kAcqRel, class Coop, int WORLD_SIZE>
KCCL_DEVICE Status barrier_direct(Channel<Coop, WORLD_SIZE>& channel) {
    static_assert(order == mem::Order::kAcqRel || order == mem::Order::kRelaxed,
                  "a barrier orders both ways or not at all");
    constexpr bool kOrders = order == mem::Order::kAcqRel;
    const Status entered = channel.next(kKcclBarrierDirect, Exchange::kPairwise);
    if (entered != kKcclOk) return entered;
    channel.template arrive<kOrders ? mem::Order::kRelease : mem::Order::kRelaxed>(
        kKcclFlagBarrier);
    return channel.template await<kOrders ? mem::Order::kAcquire : mem::Order::kRelaxed>(
        kKcclFlagBarrier);
}

namespace kernels {

KCCL_KERNEL void barrier_direct(KCCL_KERNEL_PARAM(KcclCall) call) {
    Channel<Block> channel(block(), call.comm, call.channel, 0, false);
    kccl::barrier_direct(channel);
}

}  // namespace kernels
}  // namespace kccl
