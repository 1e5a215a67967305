// Shared by the files of the host core.
#pragma once

#include "../include/kccl/abi.h"

extern "C" {
#include "api.inc"
}

namespace kccl::host {

using Kernel = void (*)(const KcclCall*);

// Every kernel, by KcclKernel, KcclDtype and KcclOp. Kernels that do not reduce are at [0][0].
struct KernelTable {
    Kernel kernel[kKcclNumKernels][kKcclNumDtypes][kKcclNumOps];
};

#if defined(__x86_64__)
extern const KernelTable kKernelsV3;  // AVX2, BMI2, FMA, PRFCHW
extern const KernelTable kKernelsV4;  // AVX-512 F, BW, DQ, VL
#endif
extern const KernelTable kKernelsBaseline;

static_assert(sizeof(KcclHostContext::pid) == 4 * kKcclMaxWorldSize &&
                  sizeof(KcclHostContext::pidfd) == 4 * kKcclMaxWorldSize &&
                  sizeof(KcclHostContext::probe) == 8 * kKcclMaxWorldSize,
              "api.inc spells array lengths as literals because cffi reads it");

// The Python extension sets it; long waits and long loops call it. It releases the interpreter's
// lock until the call's end, if the call holds it, and lets signal handlers run now and then. Not
// zero: one of them raised an exception.
extern uint32_t (*interpreter_hook)();

}  // namespace kccl::host
