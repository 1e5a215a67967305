// barrier, direct: every rank writes its epoch into every peer's window and polls its own.
// One crossing; (world_size - 1) words out: flags, and where nothing is ordered packets of nothing,
// whose way through a channel is the shorter one.
#pragma once

#include "../include/kccl/exchange.cuh"

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
    if constexpr (order == mem::Order::kRelaxed) {
        const auto send = [&](uint32_t i, bool) { ll16::push(channel, i, 0); };
        const auto take = [&](uint32_t i, bool, bool) {
            uint64_t nothing[kMaxRanks<WORLD_SIZE>];
            return ll16::await_all(channel, i, nothing);
        };
        return ll16::exchange(channel, kKcclBarrierDirect, Exchange::kPairwise, 1, true, send,
                              take);
    } else {
        const Status entered = channel.next(kKcclBarrierDirect, Exchange::kPairwise);
        if (entered != kKcclOk) return entered;
        channel.template arrive<mem::Order::kRelease>(kKcclFlagBarrier);
        return channel.template await<mem::Order::kAcquire>(kKcclFlagBarrier);
    }
}

namespace kernels {

KCCL_KERNEL void barrier_direct(KCCL_KERNEL_PARAM(KcclCall) call) {
    Channel<Block> channel(call);
    kccl::barrier_direct(channel);
}

}  // namespace kernels
}  // namespace kccl
