// send: sends an array to a peer. For CPUs only; csrc/host/messages.h matches it with the peer's
// recv. GPUs use send_recv.
#pragma once

#include "../wait.cuh"

namespace kccl {

// Sends a message of `num_bytes` bytes at `in` to rank `peer` with `tag`, which is not negative.
// Called by one thread. Blocks until `in` may be reused or the communicator fails; the status says
// which. `in` may be reused when a short message lies in the peer's ring of messages
// (messages.cuh), or a long one has been received.
KCCL_DEVICE Status send(const DeviceComm& comm, const void* in, uint64_t num_bytes, int peer,
                        int tag) {
    mem::send_message(state_of(comm)->idle_context, in, num_bytes, peer, tag);
    return status_of(comm);
}

namespace kernels {

KCCL_KERNEL void send(KCCL_KERNEL_PARAM(KcclCall) parameter) {
    const KcclCall& call = platform::first_parameter(parameter);
    mem::await_kernels_before();
    // call.channel carries the tag.
    kccl::send(call.comm, reinterpret_cast<const void*>(call.input), call.count, call.peer,
               call.channel);
}

}  // namespace kernels
}  // namespace kccl
