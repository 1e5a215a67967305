// Declarations that the files of the host core share.
#pragma once

#include "../include/kccl/abi.h"

extern "C" {
#include "api.inc"
}

namespace kccl::host {

using Kernel = void (*)(const KcclCall*);

// Sets out[i] to the reduction of rows[0][i], rows[1][i], ... for i < count. `out` may be one of
// the rows, of which there are at most kKcclMaxWorldSize.
using RowsReducer = void (*)(void* out, const void* const* rows, int num_rows, uint64_t count);

// A table of every kernel, by KcclKernel, KcclDtype and KcclOp. Kernels without an operator have 0
// there, and those without a type too. The table also has the reductions of this rank's own rows,
// by KcclDtype and KcclOp.
struct KernelTable {
    Kernel kernel[kKcclNumKernels][kKcclNumDtypes][kKcclNumOps];
    RowsReducer rows[kKcclNumDtypes][kKcclNumOps];
};

// Returns the reduction of rows for this CPU; null if the operator does not take the type. Both
// numbers must be valid.
RowsReducer rows_reducer(uint32_t dtype, uint32_t op);

#if defined(__x86_64__)
extern const KernelTable kKernelsV3;  // AVX2, BMI2, FMA, PRFCHW
extern const KernelTable kKernelsV4;  // AVX-512 F, BW, DQ, VL
#endif
extern const KernelTable kKernelsBaseline;

static_assert(sizeof(KcclHostContext::pid) == 4 * kKcclMaxWorldSize &&
                  sizeof(KcclHostContext::pidfd) == 4 * kKcclMaxWorldSize &&
                  sizeof(KcclHostContext::probe) == 8 * kKcclMaxWorldSize,
              "api.inc spells array lengths as literals because cffi reads it");

// A function that the Python extension sets, and that long waits and long loops call. If the call
// holds the GIL, it releases the GIL until the call's end. Now and then it lets signal handlers
// run. Returns nonzero if one of them has raised an exception.
extern uint32_t (*interpreter_hook)();

}  // namespace kccl::host
