// What the files of the host core share.
#pragma once

#include "../include/kccl/abi.h"

extern "C" {
#include "api.inc"
}

namespace kccl::host {

using Kernel = void (*)(const KcclCall*);

// Every kernel, by KcclKernel, KcclDtype and KcclOp. Kernels that take bytes stand under [0][0].
struct KernelTable {
    Kernel kernel[kKcclNumKernels][kKcclNumDtypes][kKcclNumOps];
};

#if defined(__x86_64__)
extern const KernelTable kKernelsV3;  // AVX2, FMA, F16C
extern const KernelTable kKernelsV4;  // AVX-512 F, BW, DQ, VL
#endif
extern const KernelTable kKernelsBaseline;

static_assert(sizeof(KcclHostContext::pid) == 4 * kKcclMaxWorldSize &&
                  sizeof(KcclHostContext::pidfd) == 4 * kKcclMaxWorldSize,
              "api.inc spells array lengths as literals because cffi reads it");

// Set by the Python extension: called in long waits and long loops. Gives up the interpreter's lock
// when the call holds it, and returns nonzero when a signal handler raised.
extern uint32_t (*interpreter_hook)();

}  // namespace kccl::host
