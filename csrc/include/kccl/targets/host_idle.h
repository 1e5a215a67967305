// What the host target does while it waits; implemented in idle.cpp, called by wait.cuh's slow
// path only.
#pragma once

#include <stdint.h>

extern "C" {

// Monotonic nanoseconds.
uint64_t kccl_host_clock_ns();

// Copies num_bytes from address `from` in the process of rank `peer`. Returns 0 or errno.
int kccl_host_read_peer(uint64_t idle_context, int peer, void* to, uint64_t from,
                        uint64_t num_bytes);

// Called between two rounds of polls. Yields the core when ranks share cores, lets the interpreter
// handle signals, and sets *gone to those of the `missing` ranks, as bits, whose process has ended.
// It looks at the processes now and then only, so bits that are not set say nothing.
// Returns kKcclInterrupted or kKcclOk.
uint32_t kccl_host_idle(uint64_t idle_context, uint64_t waited_ns, uint32_t missing,
                        uint32_t* gone);
}
