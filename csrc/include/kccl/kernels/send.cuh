// send: gives a peer an array. On CPUs only: csrc/host/messages.cpp pairs it with the peer's recv.
// GPUs have send_recv.
#pragma once

#include "../wait.cuh"

namespace kccl {

// Called by a block of one thread, as a CPU's is. Returns when `in`, `num_bytes` bytes, may be
// reused: a short message is in the peer's ring then, a long one has been received. `tag`: not
// negative.
KCCL_DEVICE Status send(const DeviceComm& comm, const void* in, uint64_t num_bytes, int peer,
                        int tag) {
    mem::send_message(state_of(comm)->idle_context, in, num_bytes, peer, tag);
    return status_of(comm);
}

namespace kernels {

KCCL_KERNEL void send(KCCL_KERNEL_PARAM(KcclCall) parameter) {
    const KcclCall& call = platform::first_parameter(parameter);
    mem::await_kernels_before();
    kccl::send(call.comm, reinterpret_cast<const void*>(call.input), call.count, call.peer,
               call.channel);
}

}  // namespace kernels
}  // namespace kccl
