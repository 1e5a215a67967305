// get: copies bytes from the peer's window into this rank's memory. One-sided: a signal or a
// barrier before it must say that the peer has written them.
#pragma once

#include "../wait.cuh"

namespace kccl {

// Called by all threads of the coop. `in` lies in the peer's window as mapped here. On return each
// thread has copied its share to `out`; after a sync of the coop all may read all of it.
template <class Coop>
KCCL_DEVICE Status get(Coop coop, const DeviceComm& comm, void* out, const void* in,
                       uint64_t num_bytes) {
    begin_together<kCoopKind<Coop>>(comm, "get",
                                    {{"out", out}, {"in", in}, {"num_bytes", num_bytes}});
    const Status status = status_of(comm);
    if (coop.any(status != kKcclOk)) return status_of(comm);
    mem::copy(out, in, num_bytes, coop.index(), coop.size());
    return kKcclOk;
}

namespace kernels {

KCCL_KERNEL void get(KCCL_KERNEL_PARAM(KcclCall) parameter) {
    const KcclCall& call = platform::first_parameter(parameter);
    mem::await_kernels_before();
    kccl::get(block(), call.comm, reinterpret_cast<void*>(call.output),
              reinterpret_cast<const void*>(call.input), call.count);
}

}  // namespace kernels
}  // namespace kccl
