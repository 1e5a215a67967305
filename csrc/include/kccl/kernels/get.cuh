// get: copies bytes from the peer's window into this rank's memory. One-sided: a signal or a
// barrier before it must say that the peer has written them.
#pragma once

#include "../one_sided.cuh"

namespace kccl {

// `in` to `in` + num_bytes lies in one window. The simulator refuses what does not: the call
// returns a failed status and copies nothing. A GPU does not know the windows.
//
// Called by all threads of the coop. `in` lies in the peer's window as mapped here. On return each
// thread has copied its share to `out`; after a sync of the coop all may read all of it.
//
// IS_LAUNCH: the host launches it, and has checked the window.
template <bool IS_LAUNCH = false, class Coop>
KCCL_DEVICE Status get(Coop coop, const DeviceComm& comm, void* out, const void* in,
                       uint64_t num_bytes) {
    begin_together<kCoopKind<Coop>>(comm, "get",
                                    {{"out", out}, {"in", in}, {"num_bytes", num_bytes}});
    const Status status = status_of(comm);
    if (coop.any(status != kKcclOk)) return status_of(comm);
    if constexpr (told::kIsTold && !IS_LAUNCH) {
        const Status found = check_window(coop, comm, kKcclGet, kKcclArgumentIn, in, num_bytes);
        if (found != kKcclOk) return found;
    }
    mem::copy(out, in, num_bytes, coop.index(), coop.size());
    return kKcclOk;
}

// Copies from the peer's part of a window, from byte `offset` on. Bytes that reach beyond the
// window are an error, and nothing is copied. Otherwise as above.
template <class Coop>
KCCL_DEVICE Status get(Coop coop, const DeviceComm& comm, const Window& window, int peer,
                       uint64_t offset, void* out, uint64_t num_bytes) {
    const Status found = check_part(coop, comm, kKcclGet, window, peer, offset, num_bytes);
    if (found != kKcclOk) return found;
    return get(coop, comm, out, window.at(peer, offset), num_bytes);
}

namespace kernels {

KCCL_KERNEL void get(KCCL_KERNEL_PARAM(KcclCall) parameter) {
    const KcclCall& call = platform::first_parameter(parameter);
    mem::await_kernels_before();
    kccl::get<true>(block(), call.comm, reinterpret_cast<void*>(call.output),
                    reinterpret_cast<const void*>(call.input), call.count);
}

}  // namespace kernels
}  // namespace kccl
