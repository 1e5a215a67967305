// put: copies bytes from this rank's memory into the peer's window. One-sided: the peer makes no
// call. A later signal or barrier tells the peer that the bytes are there, and makes them visible.
#pragma once

#include "../one_sided.cuh"

namespace kccl {

// Copies `num_bytes` bytes at `in` to `out`. All bytes at `out` lie in one window of the peer, and
// `out` is their address in this rank's address space. The simulator refuses other addresses: the
// call returns a failed status and copies nothing. A GPU does not know the windows, so it checks
// nothing.
//
// Called by all threads of the coop (a thread, warp or block: coop.cuh). On return each thread has
// read its share of `in`. After a sync of the coop all threads may write all of `in`.
//
// IS_LAUNCH: the host launches this call as a kernel, and has checked the window.
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

// Copies `num_bytes` bytes at `in` into the peer's part of `window`, from byte `offset` on. If they
// reach beyond the window, returns a failed status and copies nothing. Threads and syncs are as in
// put() without a Window.
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
