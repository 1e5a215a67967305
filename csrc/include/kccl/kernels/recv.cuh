// recv: receives an array that a peer sends. For CPUs only; csrc/host/messages.h matches it with
// the peer's send. GPUs use send_recv.
#pragma once

#include "../wait.cuh"

namespace kccl {

// Receives a message of `num_bytes` bytes from rank `peer` with `tag` into `out`. peer -1: from any
// rank. tag -1: with any tag. Takes the first matching message that has already arrived; if there
// is none, waits for one. The sender's message must have the same length, else the communicator
// fails. Called by one thread. Blocks until `out` is complete or the communicator fails; the status
// says which.
KCCL_DEVICE Status recv(const DeviceComm& comm, void* out, uint64_t num_bytes, int peer, int tag) {
    mem::receive_message(state_of(comm)->idle_context, out, num_bytes, peer, tag);
    return status_of(comm);
}

namespace kernels {

KCCL_KERNEL void recv(KCCL_KERNEL_PARAM(KcclCall) parameter) {
    const KcclCall& call = platform::first_parameter(parameter);
    mem::await_kernels_before();
    // call.channel carries the tag.
    kccl::recv(call.comm, reinterpret_cast<void*>(call.output), call.count, call.peer,
               call.channel);
}

}  // namespace kernels
}  // namespace kccl
