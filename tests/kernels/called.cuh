// Included first: lets the simulator call the library's functions where it would inline them. Then the tests'
// kernel, which can make all calls, compiles in a quarter of the time. What makes the accesses stays
// inlined, so that reports name the function that made them.
#pragma once

#include <kccl/coop.cuh>

#if defined(KCCL_TARGET_SIM)
#undef KCCL_DEVICE
#define KCCL_DEVICE inline
#endif
