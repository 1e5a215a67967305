// Included first: in the simulator the library's functions are called, where they would be inlined.
// So the tests' kernel, which can make all calls, compiles in a quarter of the time. What makes the
// accesses stays inlined, so that reports name the function that made them.
#pragma once

#include <kccl/coop.cuh>

#if defined(KCCL_TARGET_SIM)
#undef KCCL_DEVICE
#define KCCL_DEVICE inline
#endif
