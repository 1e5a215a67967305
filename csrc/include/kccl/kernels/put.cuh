// put: copies bytes from this rank's memory into the peer's window. One-sided: the peer does
// nothing. A later signal or barrier tells it, and orders the bytes.
#pragma once

#include "../one_sided.cuh"

namespace kccl {

// `out` to `out` + num_bytes lies in one window. The simulator refuses what does not: the call
// returns a failed status and copies nothing. A GPU does not know the windows.
//
// Called by all threads of the coop. `out` lies in the peer's window as mapped here. On return each
// thread has read its share of `in`; after a sync of the coop all may write all of it.
//
// IS_LAUNCH: the host launches it, and has checked the window.
template <bool IS_LAUNCH = false, class Coop>
KCCL_DEVICE Status put(Coop coop, const DeviceComm& comm, void* out, const void* in,
                       uint64_t num_bytes) {
    begin_together<kCoopKind<Coop>>(comm, "put",
                                    {{"out", out}, {"in", in}, {"num_bytes", num_bytes}});
    const Status status = status_of(comm);
    if (coop.any(status != kKcclOk)) return status_of(comm);
    if constexpr (told::kIsTold && !IS_LAUNCH) {
        const Status found = check_window(coop, comm, kKcclPut, kKcclArgumentOut, out, num_bytes);
        if (found != kKcclOk) return found;
    }
    mem::copy(out, in, num_bytes, coop.index(), coop.size());
    return kKcclOk;
}

// Copies into the peer's part of a window, from byte `offset` on. Bytes that reach beyond the
// window are an error, and nothing is copied. Otherwise as above.
template <class Coop>
KCCL_DEVICE Status put(Coop coop, const DeviceComm& comm, const Window& window, int peer,
                       uint64_t offset, const void* in, uint64_t num_bytes) {
    const Status found = check_part(coop, comm, kKcclPut, window, peer, offset, num_bytes);
    if (found != kKcclOk) return found;
    return put(coop, comm, window.at(peer, offset), in, num_bytes);
}

namespace kernels {

KCCL_KERNEL void put(KCCL_KERNEL_PARAM(KcclCall) parameter) {
    const KcclCall& call = platform::first_parameter(parameter);
    mem::await_kernels_before();
    kccl::put<true>(block(), call.comm, reinterpret_cast<void*>(call.output),
                    reinterpret_cast<const void*>(call.input), call.count);
}

}  // namespace kernels
}  // namespace kccl
