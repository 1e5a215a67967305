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

using kccl::mem::Order, kccl::mem::Scope;

// Whether the call goes out as its graph, which takes the driver half as long as a kernel. A stream
// that is being captured takes the kernel, into the graph that is made of it; one that does not say
// whether it is (an error) too, so that what the driver says of it is said of a kernel.
bool takes_graph(const KcclGpuOp& op) {
    if (op.graph == 0) return false;
    int status = 0;
    return reinterpret_cast<IsCapturing>(op.queue->is_capturing)(op.stream, &status) == 0 &&
           status == 0;
}

int launch_kernel(const KcclGpuOp& op) {
    KcclCall call = op.op.call;
    call.comm.state = op.queue->state;
    void* arguments[] = {&call};
    return reinterpret_cast<Launch>(op.queue->launch)(op.function, op.num_blocks, 1, 1,
                                                      op.threads_per_block, 1, 1, 0, op.stream,
                                                      arguments, nullptr);
}

// 0, or the driver's error, which the queue notes too.
int launch(KcclGpuOp& op) {
    KcclGpuQueue& queue = *op.queue;
    uint64_t before;
    int error = reinterpret_cast<PushContext>(queue.push_context)(queue.context);
    if (error != 0) {
        queue.error = error;
        queue.is_graph = 0;
        return error;
    }
    // A second thread at the same time launches the kernel.
    const bool is_graph = takes_graph(op) && kccl::mem::claim(&op.is_taken, 1u);
    if (is_graph) {
        kccl::mem::fence<Order::kAcqRel, Scope::kSystem>();
        error = reinterpret_cast<LaunchGraph>(queue.launch_graph)(op.graph, op.stream);
        kccl::mem::store<Order::kRelease, Scope::kSystem>(&op.is_taken, 0u);
    } else {
        error = launch_kernel(op);
    }
    reinterpret_cast<PopContext>(queue.pop_context)(&before);
    if (error != 0) {
        queue.error = error;
        queue.is_graph = is_graph;
    }
    return error;
}

}  // namespace

extern "C" {

uint32_t kccl_gpu_hear(const KcclGpuQueue* queue, KcclState* state) {
    if (state->status != kKcclOk) return state->status;
    const uint32_t told = kccl::mem::load<Order::kAcquire, Scope::kSystem>(&queue->mailbox->status);
    if (told == kKcclOk) return kKcclOk;
    state->record = queue->mailbox->record;
    state->status = told;
    return told;
}

void kccl_gpu_run_op(const KcclCall* call) {
    auto* bytes = reinterpret_cast<uint8_t*>(const_cast<KcclCall*>(call));
    auto* op = reinterpret_cast<KcclGpuOp*>(bytes - offsetof(KcclGpuOp, op.call));
    auto* state = reinterpret_cast<KcclState*>(call->comm.state);
    if (kccl_gpu_hear(op->queue, state) != kKcclOk) return;
    if (launch(*op) != 0) state->status = kKcclAborted;
}

}  // extern "C"
