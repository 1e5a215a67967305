// get: copies bytes from the peer's window into this rank's memory. One-sided: the peer makes no
// call. Before it, a signal or a barrier must have told this rank that the peer has written the
// bytes.
#pragma once

#include "../one_sided.cuh"

namespace kccl {

// Copies `num_bytes` bytes at `in` to `out`. All of them lie in one window of the peer, and `in` is
// their address in this rank's address space. The simulator refuses other addresses: the call
// returns a failed status and copies nothing. A GPU does not know the windows, so it checks
// nothing.
//
// Called by all threads of the coop (a thread, warp or block: coop.cuh). On return each thread has
// copied its share. After a sync of the coop all threads may read all of `out`.
//
// IS_LAUNCH: the host launches this call as a kernel, and has checked the window.
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

// Copies `num_bytes` bytes from the peer's part of `window`, from byte `offset` on, to `out`. If
// they reach beyond the window, returns a failed status and copies nothing. Threads and syncs are
// as in get() without a Window.
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
