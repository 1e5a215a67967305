// recv: takes the array that a peer sends. On CPUs only: csrc/host/messages.cpp pairs it with the
// peer's send. GPUs have send_recv.
#pragma once

#include "../wait.cuh"

namespace kccl {

// Called by a block of one thread, as a CPU's is. Returns when `out` has the `num_bytes` bytes of
// the first message that has come, or else comes, from `peer` with `tag`; -1: from any, with any.
KCCL_DEVICE Status recv(const DeviceComm& comm, void* out, uint64_t num_bytes, int peer, int tag) {
    mem::receive_message(state_of(comm)->idle_context, out, num_bytes, peer, tag);
    return status_of(comm);
}

namespace kernels {

KCCL_KERNEL void recv(KCCL_KERNEL_PARAM(KcclCall) parameter) {
    const KcclCall& call = platform::first_parameter(parameter);
    mem::await_kernels_before();
    kccl::recv(call.comm, reinterpret_cast<void*>(call.output), call.count, call.peer,
               call.channel);
}

}  // namespace kernels
}  // namespace kccl
