// Defines the macro that declares the monokernel's functions.
#pragma once

#include <kccl/kccl.cuh>

// KCCL_DECODE: a function of the monokernel. GPUs inline it always. In the simulator it is called,
// because its compiler then takes a third of the time. The library's functions stay inlined there,
// so that a report can name the line of the monokernel that calls them.
#if defined(KCCL_TARGET_SIM)
#define KCCL_DECODE inline
#else
#define KCCL_DECODE KCCL_DEVICE
#endif
