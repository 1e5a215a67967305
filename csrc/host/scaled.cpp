// Makes a KcclScaledOp: a call of this rank that multiplies the input, the collective, and a call
// of this rank that rounds the result.
#include <stddef.h>

#include "../include/kccl/wait.cuh"
#include "host.h"

namespace {

// Makes one of the three calls, with these addresses as its input and output. On a GPU sets its
// stream to that of the whole call. Returns false if the call has failed.
bool run(const KcclScaledOp& all, KcclHostOp* op, uint64_t input, uint64_t output) {
    op->call.input = input;
    op->call.output = output;
    if (all.op.queue != nullptr) reinterpret_cast<KcclGpuOp*>(op)->stream = all.op.stream;
    return kccl_host_run(op) == kKcclOk;
}

}  // namespace

extern "C" void kccl_run_scaled(const KcclCall* call) {
    const auto& all = *reinterpret_cast<const KcclScaledOp*>(
        reinterpret_cast<const uint8_t*>(call) - offsetof(KcclScaledOp, op.op.call));
    // After a communicator is closed, its status is not ok, and the memory for the products is
    // gone.
    if (kccl::status_of(call->comm) != kKcclOk) return;
    const uint64_t sums = all.narrow != nullptr ? all.sums : call->output;
    if (!run(all, all.scale, call->input, all.products)) return;
    if (!run(all, all.sum, all.products, sums)) return;
    if (all.narrow != nullptr) run(all, all.narrow, sums, call->output);
}
