// put: copies call.count bytes from this rank's memory into the peer's window. One-sided: the peer
// does nothing, and knows of it only by a later signal or barrier, which also orders it.
#pragma once

#include "../include/kccl/signal.cuh"

namespace kccl {

// Called by all threads of the coop. `out` lies in the peer's window as mapped here. `in` may be
// reused on return.
template <class Coop>
KCCL_DEVICE Status put(Coop coop, const Call& call) {
    const Status status = status_of(call.comm);
    if (coop.any(status != kKcclOk)) return status_of(call.comm);
    mem::copy(reinterpret_cast<void*>(call.output), reinterpret_cast<const void*>(call.input),
              call.count, coop.index(), coop.size());
    return kKcclOk;
}

namespace kernels {

KCCL_KERNEL void put(KCCL_KERNEL_PARAM(KcclCall) call) { kccl::put(block(), call); }

}  // namespace kernels
}  // namespace kccl
