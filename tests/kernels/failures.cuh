// Calls that go on behind a failure.
#pragma once

#include <kccl/kccl.cuh>

namespace kccl {

// Called by all threads of the coop. The channel, or none: then each call opens its own.
template <uint64_t KERNELS, class Coop, class... Open>
KCCL_DEVICE Status make_failing_call(const DeviceComm& comm, const Call& call, Coop coop,
                                     Open&... open) {
    auto* const out = output_of<float>(call);
    const auto* const in = input_of<float>(call);
    const auto of_coop = [&](auto collective) {
        if constexpr (sizeof...(open) != 0) {
            return collective(open...);
        } else {
            return collective(coop, comm);
        }
    };
    if (call.kernel == kKcclAllReduceOneShotLl16) {
        return of_coop([&](auto&&... of) { return all_reduce(of..., out, in, call.count); });
    }
    if (call.kernel == kKcclBroadcastDirectLl16) {
        const bool is_root = comm.rank == call.peer;
        return of_coop([&](auto&&... of) {
            return broadcast(of..., is_root ? nullptr : out, in, call.count, call.peer);
        });
    }
    if (call.kernel == kKcclBarrierDirect) {
        return of_coop([&](auto&&... of) { return barrier(of...); });
    }
    if constexpr ((KERNELS >> kKcclGridSync & 1u) != 0) {
        if (call.kernel == kKcclGridSync) return grid_sync(comm);
        GridExchange<kKcclReachAllRanks> blocks(comm);
        const auto count = static_cast<uint32_t>(call.count);
        publish(blocks, in, count);
        return collect_reduced(blocks, out, count, Slices{platform::block_in_grid(), 1});
    }
    return kKcclForked;
}

namespace kernels {

// `calls`: `count` for each coop, which makes all of them, whatever they return. AT_A_TIME: how
// many on one open channel; 0: each call opens its own. A coop's word of `wrong` becomes 1 if a
// call behind a failed one returns another status, or if a call is ok but an element of its result
// is not call.share.
template <uint32_t AT_A_TIME, uint64_t KERNELS, class Coop>
KCCL_KERNEL void go_on(KCCL_KERNEL_PARAM(KcclDeviceComm) comm, const Call* calls, uint32_t count,
                       uint32_t* wrong) {
    const Coop coop;
    const Call* mine = calls + uint64_t(default_channel(coop)) * count;
    Status first = kKcclOk;
    bool is_wrong = false;
    const auto check = [&](const Call& call, Status status) {
        is_wrong |= first != kKcclOk && status != first;
        if (first == kKcclOk) first = status;
        if (status != kKcclOk || call.share == 0) return;
        for (uint64_t i = coop.size() - 1 - coop.index(); i < call.count; i += coop.size()) {
            is_wrong |= mem::load_plain(output_of<float>(call) + i) != float(call.share);
        }
    };
    for (uint32_t begin = 0; begin < count; begin += AT_A_TIME == 0 ? 1 : AT_A_TIME) {
        if constexpr (AT_A_TIME == 0) {
            const Call call = mem::load_plain(mine + begin);
            check(call, make_failing_call<KERNELS>(comm, call, coop));
        } else {
            Channel<Coop> channel(coop, comm);
            for (uint32_t i = begin; i < begin + AT_A_TIME && i < count; ++i) {
                const Call call = mem::load_plain(mine + i);
                check(call, make_failing_call<KERNELS>(comm, call, coop, channel));
            }
        }
    }
    if (coop.any(is_wrong) && leads(coop)) mem::store_plain(wrong + default_channel(coop), 1u);
}

}  // namespace kernels
}  // namespace kccl
