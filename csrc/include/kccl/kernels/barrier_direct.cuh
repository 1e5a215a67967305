// barrier, direct: every rank pushes an empty packet into every rank's window and polls its own
// window. The packets cross the links once; a rank sends world_size - 1 of them to peers.
#pragma once

#include "../exchange.cuh"

namespace kccl {

// Waits for the packets of all ranks, each thread for the packet of a different rank, and acquires
// what the ranks wrote before their packets. Returns false if the wait failed. Called by all
// threads of the channel's coop (a thread, warp or block: coop.cuh).
template <class Coop, int WORLD_SIZE>
KCCL_DEVICE bool acquire_each(const Channel<Coop, WORLD_SIZE>& channel) {
    const uint32_t world_size = channel.world_size();
    bool has_come = true;
    // A coop with a thread for each rank needs one turn, in which only its first warp takes part.
    for (uint32_t turn = 0; turn < world_size && has_come; turn += channel.num_threads()) {
        const uint32_t mine = turn + channel.thread();
        if (!platform::warp_any(mine < world_size)) break;
        const uint32_t source = mine < world_size ? mine : world_size - 1;
        uint64_t nothing;
        has_come = ll16::await_one(channel, source, 0, &nothing);
        // The fence comes behind the polls, not in each of them, because each acquire empties the
        // L1 cache.
        mem::fence<mem::Order::kAcquire, mem::Scope::kSystem>();
    }
    return has_come;
}

// Waits until the coops of all ranks have called it on this channel. Called by all threads of the
// channel's coop; all get the same status.
//
// kAcqRel: what any rank's coop wrote before the barrier, puts included, is visible to every rank's
// coop after it. kRelaxed: the barrier orders no memory; for data that carries its own flags.
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
        channel.coop().sync();
        const bool leads = channel.thread() == 0;
        // The fence comes first, so that it overlaps with the loads that open the channel.
        if (leads) mem::fence<mem::Order::kRelease, mem::Scope::kSystem>();
        if (!channel.enter(kKcclBarrierDirect)) return channel.leave(true);
        if (leads) ll16::push(channel, 0, 0);
        channel.sent();
        return channel.leave(!acquire_each(channel));
    }
}

namespace kernels {

template <int WORLD_SIZE>
KCCL_KERNEL void barrier_direct(KCCL_KERNEL_PARAM(KcclCall) parameter) {
    const KcclCall& call = platform::first_parameter(parameter);
    Channel<Block, WORLD_SIZE> channel(call);
    channel.expect_end();
    kccl::barrier_direct(channel);
}

}  // namespace kernels
}  // namespace kccl
