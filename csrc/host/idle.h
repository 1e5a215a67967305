// What the host target does while it waits; implemented in idle.cpp, called by signal.cuh's slow
// path only.
#pragma once

#include <stdint.h>

extern "C" {

// Monotonic nanoseconds.
uint64_t kccl_host_clock_ns();

// Called between two rounds of polls. Yields the core when ranks share cores, looks whether a
// peer's process is gone and whether the interpreter has a signal to handle. Returns a KcclStatus;
// kKcclPeerLost sets *peer to the rank that is gone.
uint32_t kccl_host_idle(uint64_t idle_context, uint64_t waited_ns, int32_t* peer);
}
