// How the simulator makes the calls of all_gather: see made.cuh.
#pragma once

#include <kccl/kernels/all_gather_pull_simple.cuh>
#include <kccl/kernels/all_gather_push_simple.cuh>

#include "made.cuh"

namespace kccl {

template <>
struct Made<kKcclAllGatherDirectLl16> : IsMade {
    template <class T, class Op, class Coop>
    KCCL_DEVICE static Status make(Channel<Coop>& channel, const Call& call) {
        return make_in_rounds<uint8_t>(
            channel, call, [&](uint8_t* out, const uint8_t* in, uint32_t count) {
                return all_gather_direct_ll16(channel, out, in, count, call.count);
            });
    }
};

template <>
struct Made<kKcclAllGatherPullSimple> : IsMade {
    template <class T, class Op, class Coop>
    KCCL_DEVICE static Status make(Channel<Coop>& channel, const Call& call) {
        return all_gather_pull_simple(channel, output_of<uint8_t>(call), input_of<uint8_t>(call),
                                      call.count, call.count);
    }
};

template <>
struct Made<kKcclAllGatherPushSimple> : IsMade {
    template <class T, class Op, class Coop>
    KCCL_DEVICE static Status make(Channel<Coop>& channel, const Call& call) {
        return all_gather_push_simple(channel, output_of<uint8_t>(call), input_of<uint8_t>(call),
                                      call.count, call.count);
    }
};

template <>
struct MadeByUsers<kKcclAllGatherDirectLl16> : IsMade {
    template <class T, class Op, class By>
    KCCL_DEVICE static Status make(By& by, const Call& call) {
        return by([&](auto&&... of) {
            return all_gather(of..., output_of<uint8_t>(call), input_of<uint8_t>(call), call.count);
        });
    }
};

}  // namespace kccl
