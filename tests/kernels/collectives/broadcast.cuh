// How the simulator makes the calls of broadcast: see made.cuh.
#pragma once

#include <kccl/kernels/broadcast_push_simple.cuh>

#include "made.cuh"

namespace kccl {

template <>
struct Made<kKcclBroadcastDirectLl16> : IsMade {
    template <class T, class Op, class Coop>
    KCCL_DEVICE static Status make(Channel<Coop>& channel, const Call& call) {
        return make_in_rounds<uint8_t>(
            channel, call, [&](uint8_t* out, const uint8_t* in, uint32_t count) {
                return broadcast_direct_ll16(channel, out, in, count, call.peer);
            });
    }
};

template <>
struct Made<kKcclBroadcastPushSimple> : IsMade {
    template <class T, class Op, class Coop>
    KCCL_DEVICE static Status make(Channel<Coop>& channel, const Call& call) {
        return broadcast_push_simple(channel, output_of<uint8_t>(call), input_of<uint8_t>(call),
                                     call.count, call.peer);
    }
};

template <>
struct MadeByUsers<kKcclBroadcastDirectLl16> : IsMade {
    template <class T, class Op, class By>
    KCCL_DEVICE static Status make(By& by, const Call& call) {
        return by([&](auto&&... of) {
            return broadcast(of..., output_of<uint8_t>(call), input_of<uint8_t>(call), call.count,
                             call.peer);
        });
    }
};

}  // namespace kccl
