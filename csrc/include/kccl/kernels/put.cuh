// put: copies bytes from this rank's memory into the peer's window. One-sided: the peer does
// nothing. A later signal or barrier tells it, and orders the bytes.
#pragma once

#include "../wait.cuh"

namespace kccl {

// Called by all threads of the coop. `out` lies in the peer's window as mapped here. `in` may be
// reused on return.
template <class Coop>
KCCL_DEVICE Status put(Coop coop, const DeviceComm& comm, void* out, const void* in,
                       uint64_t num_bytes) {
    begin_together<kCoopKind<Coop>>(comm, "put",
                                    {{"out", out}, {"in", in}, {"num_bytes", num_bytes}});
    const Status status = status_of(comm);
    if (coop.any(status != kKcclOk)) return status_of(comm);
    mem::copy(out, in, num_bytes, coop.index(), coop.size());
    return kKcclOk;
}

namespace kernels {

KCCL_KERNEL void put(KCCL_KERNEL_PARAM(KcclCall) parameter) {
    const KcclCall& call = platform::first_parameter(parameter);
    mem::await_kernels_before();
    kccl::put(block(), call.comm, reinterpret_cast<void*>(call.output),
              reinterpret_cast<const void*>(call.input), call.count);
}

}  // namespace kernels
}  // namespace kccl
