// Makes a KcclScaledOp: a call of this rank that multiplies the input, the collective, and a call
// of this rank that rounds the result.
#include <stddef.h>

#include "../include/kccl/wait.cuh"
#include "host.h"

extern "C" void kccl_run_scaled(const KcclCall* call) {
    const auto& all = *reinterpret_cast<const KcclScaledOp*>(
        reinterpret_cast<const uint8_t*>(call) - offsetof(KcclScaledOp, op.op.call));
    // After a communicator is closed, its status is not ok, and the memory for the products is
    // gone.
    if (kccl::status_of(call->comm) != kKcclOk) return;
    const uint64_t sums = all.narrow != nullptr ? all.sums : call->output;
    if (!kccl::host::run_part(all.op, all.scale, call->input, all.products)) return;
    if (!kccl::host::run_part(all.op, all.sum, all.products, sums)) return;
    if (all.narrow != nullptr) kccl::host::run_part(all.op, all.narrow, sums, call->output);
}
