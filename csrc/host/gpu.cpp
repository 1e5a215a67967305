// Launching calls on a GPU, through the driver's functions that Python looked up.
#include <stddef.h>

#include "../include/kccl/mem.cuh"
#include "host.h"

namespace {

using Launch = int (*)(uint64_t function, unsigned, unsigned, unsigned, unsigned, unsigned,
                       unsigned, unsigned shared_bytes, uint64_t stream, void** arguments,
                       void** extra);
using LaunchGraph = int (*)(uint64_t graph, uint64_t stream);
using IsCapturing = int (*)(uint64_t stream, int* status);
using PushContext = int (*)(uint64_t context);
using PopContext = int (*)(uint64_t* context);

// Whether a stream takes graphs. One that is being captured takes kernels, into the graph that is
// made of it. So does one that does not say whether it is: then the kernel's launch says why.
bool takes_graphs(const KcclGpuQueue& queue, uint64_t stream) {
    int status = 0;
    return reinterpret_cast<IsCapturing>(queue.is_capturing)(stream, &status) == 0 && status == 0;
}

int launch_kernel(const KcclGpuOp& op, uint64_t stream) {
    KcclCall call;
    kccl_gpu_argument(&op, &call);
    void* arguments[] = {&call};
    return reinterpret_cast<Launch>(op.queue->launch)(op.function, op.num_blocks, 1, 1,
                                                      op.threads_per_block, 1, 1, 0, stream,
                                                      arguments, nullptr);
}

// 0, or the driver's error, which the queue notes too.
int launch(const KcclGpuOp& op) {
    KcclGpuQueue& queue = *op.queue;
    const uint64_t stream = op.stream;
    uint64_t before;
    bool is_graph = false;
    int error = reinterpret_cast<PushContext>(queue.push_context)(queue.context);
    if (error == 0) {
        is_graph = op.graph != 0 && takes_graphs(queue, stream);
        error = is_graph ? reinterpret_cast<LaunchGraph>(queue.launch_graph)(op.graph, stream)
                         : launch_kernel(op, stream);
        reinterpret_cast<PopContext>(queue.pop_context)(&before);
    }
    if (error != 0) {
        queue.error = error;
        queue.is_graph = is_graph;
    }
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

void kccl_gpu_argument(const KcclGpuOp* op, KcclCall* filled) {
    *filled = op->op.call;
    filled->comm.state = op->queue->state;
}

void kccl_gpu_run_op(const KcclCall* call) {
    const auto* op = reinterpret_cast<const KcclGpuOp*>(reinterpret_cast<const uint8_t*>(call) -
                                                        offsetof(KcclGpuOp, op.call));
    auto* state = reinterpret_cast<KcclState*>(call->comm.state);
    if (kccl_gpu_hear(op->queue, state) != kKcclOk) return;
    if (launch(*op) != 0) state->status = kKcclAborted;
}

}  // extern "C"
