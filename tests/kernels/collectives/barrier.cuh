// How the simulator makes the calls of barrier: see made.cuh.
#pragma once

#include "made.cuh"

namespace kccl {

template <>
struct Made<kKcclBarrierDirect> : IsMade {
    template <class T, class Op, class Coop>
    KCCL_DEVICE static Status make(Channel<Coop>& channel, const Call&) {
        return barrier_direct(channel);
    }
};

template <>
struct MadeByUsers<kKcclBarrierDirect> : IsMade {
    template <class T, class Op, class By>
    KCCL_DEVICE static Status make(By& by, const Call&) {
        return by([&](auto&&... of) { return barrier(of...); });
    }
};

}  // namespace kccl
