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
struct MadeByGrid<kKcclBarrierDirect> : IsMade {
    template <class T, class Op>
    KCCL_DEVICE static Status make(const DeviceComm& comm, const Call&) {
        return barrier(grid(), comm);
    }
};

}  // namespace kccl
