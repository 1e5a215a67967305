// Makes a KcclNormedOp: a collective that sums over the ranks, and then a call of this rank that
// normalises the rows of the sum.
#include <stddef.h>

#include "../include/kccl/wait.cuh"
#include "host.h"

extern "C" void kccl_run_normed(const KcclCall* call) {
    const auto& all = *reinterpret_cast<const KcclNormedOp*>(
        reinterpret_cast<const uint8_t*>(call) - offsetof(KcclNormedOp, op.op.call));
    // After a communicator is closed, its status is not ok, and the memory for the sum is gone.
    if (kccl::status_of(call->comm) != kKcclOk) return;
    const uint64_t sums = all.sums != 0 ? all.sums : call->output;
    if (!kccl::host::run_part(all.op, all.sum, call->input, sums)) return;
    kccl::host::run_part(all.op, all.norm, sums, call->output);
}
