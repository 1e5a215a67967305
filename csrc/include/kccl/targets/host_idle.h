// Functions of the library's host part that device code calls on the host target: in the slow path
// of its waits (wait.cuh), to read a peer's memory, and to send and receive messages.
// csrc/host/idle.cpp and messages.cpp implement them.
#pragma once

#include <stdint.h>

extern "C" {

// Returns the time of a monotonic clock in nanoseconds.
uint64_t kccl_host_clock_ns();

// Copies num_bytes from address `from` in the process of rank `peer`. Returns 0 or errno.
int kccl_host_read_peer(uint64_t idle_context, int peer, void* to, uint64_t from,
                        uint64_t num_bytes);

// Tells whether this process may read the memory of rank `peer`, by reading a word there. If it may
// not, records why.
int kccl_host_may_read_peer(uint64_t idle_context, int peer);

// Records the errno of a read from process `pid` of rank `peer`, as kccl_host_may_read_peer() does,
// so that the user is warned. Returns whether there was no error.
int kccl_host_note_read(uint64_t idle_context, int peer, int pid, int error);

// Sends a message, and returns when its bytes may be reused; receives one. Both return early when
// the communicator fails.
void kccl_host_send(uint64_t idle_context, const void* in, uint64_t num_bytes, int peer, int tag);
void kccl_host_receive(uint64_t idle_context, void* out, uint64_t num_bytes, int peer, int tag);

// Called between two rounds of polls. Yields the core after 1 us of waiting, at once if ranks share
// cores, and lets Python handle signals. Sets in *gone a bit for each rank of `missing` whose
// process has ended. It checks the processes only from time to time, so a bit that is not set says
// nothing. Returns kKcclInterrupted or kKcclOk.
uint32_t kccl_host_idle(uint64_t idle_context, uint64_t waited_ns, uint32_t missing,
                        uint32_t* gone);
}
