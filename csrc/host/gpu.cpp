// Launching calls on a GPU, through the driver's functions that Python looked up.
#include <stddef.h>

#include "../include/kccl/mem.cuh"
#include "host.h"

namespace {

using Launch = int (*)(uint64_t function, unsigned, unsigned, unsigned, unsigned, unsigned,
                       unsigned, unsigned shared_bytes, uint64_t stream, void** arguments,
                       void** extra);
using PushContext = int (*)(uint64_t context);
using PopContext = int (*)(uint64_t* context);

// 0, or the driver's error.
uint32_t launch(const KcclGpuOp& op, KcclCall& call) {
    const KcclGpuQueue& queue = *op.queue;
    void* arguments[] = {&call};
    uint64_t before;
    int error = reinterpret_cast<PushContext>(queue.push_context)(queue.context);
    if (error != 0) return error;
    error = reinterpret_cast<Launch>(queue.launch)(op.function, op.num_blocks, 1, 1,
                                                   op.threads_per_block, 1, 1, 0, op.stream,
                                                   arguments, nullptr);
    reinterpret_cast<PopContext>(queue.pop_context)(&before);
    return error;
}

}  // namespace

extern "C" {

uint32_t kccl_gpu_hear(const KcclGpuQueue* queue, KcclState* state) {
    using kccl::mem::Order, kccl::mem::Scope;
    if (state->status != kKcclOk) return state->status;
    const uint32_t told = kccl::mem::load<Order::kAcquire, Scope::kSystem>(&queue->mailbox->status);
    if (told == kKcclOk) return kKcclOk;
    state->record = queue->mailbox->record;
    state->status = told;
    return told;
}

void kccl_gpu_run_op(const KcclCall* call) {
    const auto* op = reinterpret_cast<const KcclGpuOp*>(reinterpret_cast<const uint8_t*>(call) -
                                                        offsetof(KcclGpuOp, op.call));
    auto* state = reinterpret_cast<KcclState*>(call->comm.state);
    if (kccl_gpu_hear(op->queue, state) != kKcclOk) return;
    KcclCall copy = *call;
    copy.comm.state = op->queue->state;
    const uint32_t error = launch(*op, copy);
    if (error == 0) return;
    op->queue->error = error;
    state->status = kKcclAborted;
}

}  // extern "C"
