// Makes a KcclNormedOp: a collective that sums over the ranks, and then a call of this rank that
// normalises the rows of the sum.
#include <stddef.h>

#include "../include/kccl/wait.cuh"
#include "host.h"

namespace {

// Makes one of the two calls, with these addresses as its input and output. On a GPU sets its
// stream to that of the whole call. Returns false if the call has failed.
bool run(const KcclNormedOp& all, KcclHostOp* op, uint64_t input, uint64_t output) {
    op->call.input = input;
    op->call.output = output;
    if (all.op.queue != nullptr) reinterpret_cast<KcclGpuOp*>(op)->stream = all.op.stream;
    return kccl_host_run(op) == kKcclOk;
}

}  // namespace

extern "C" void kccl_run_normed(const KcclCall* call) {
    const auto& all = *reinterpret_cast<const KcclNormedOp*>(
        reinterpret_cast<const uint8_t*>(call) - offsetof(KcclNormedOp, op.op.call));
    // After a communicator is closed, its status is not ok, and the memory for the sum is gone.
    if (kccl::status_of(call->comm) != kKcclOk) return;
    const uint64_t sums = all.sums != 0 ? all.sums : call->output;
    if (!run(all, all.sum, call->input, sums)) return;
    run(all, all.norm, sums, call->output);
}
