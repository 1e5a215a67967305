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

// The kernels compiled for one instruction set. kernel: by KcclKernel, KcclDtype and KcclOp.
// Kernels without an operator stand at operator 0; kernels without a type also at type 0. Null:
// there is no such kernel. units: by KcclKernel and KcclDtype, in how many units a kernel that
// reduces takes an element, see Raw in reducers.h; 0 for other kernels. rows: by KcclDtype and
// KcclOp, the functions that reduce rows in this rank's own memory.
struct KernelTable {
    Kernel kernel[kKcclNumKernels][kKcclNumDtypes][kKcclNumOps];
    uint8_t units[kKcclNumKernels][kKcclNumDtypes];
    RowsReducer rows[kKcclNumDtypes][kKcclNumOps];
};

// Returns the function that reduces rows on this CPU; null if the operator does not take the type.
// dtype, op: valid numbers of KcclDtype and KcclOp.
RowsReducer rows_reducer(uint32_t dtype, uint32_t op);

#if defined(__x86_64__)
extern const KernelTable kKernelsV3;  // uses AVX2, BMI2, FMA and PRFCHW
extern const KernelTable kKernelsV4;  // also uses AVX-512 F, BW, DQ and VL
#endif
extern const KernelTable kKernelsBaseline;

// Makes one call of an operation that is several calls, with these addresses as its input and
// output. all: the whole operation; on a GPU each call takes its stream. Returns false if the call
// has failed.
inline bool run_part(const KcclGpuOp& all, KcclHostOp* op, uint64_t input, uint64_t output) {
    op->call.input = input;
    op->call.output = output;
    if (all.queue != nullptr) reinterpret_cast<KcclGpuOp*>(op)->stream = all.stream;
    return kccl_host_run(op) == kKcclOk;
}

// A function that kccl._fastcall sets, and that long waits and long loops call; null: not set. If
// the thread's call from Python holds the GIL, the function releases the GIL until the call's end.
// Every 20 ms it lets Python's signal handlers run. It returns nonzero if one of them has raised an
// exception.
extern uint32_t (*interpreter_hook)();

}  // namespace kccl::host
