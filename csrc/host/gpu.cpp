// Launches calls on a GPU, through driver functions that Python has looked up.
#include <stddef.h>
#include <string.h>

#include "../include/kccl/mem.cuh"
#include "cuda_driver.h"
#include "host.h"
#include "on_device.h"

namespace driver = kccl::driver;

namespace {

constexpr char kOwnKernels[] = "_ZN4kccl7kernels";  // kccl::kernels, as mangled names begin

// The kernel node of a call of this library, in a graph that is being captured.
struct CallNode {
    uint64_t node = 0;  // 0: none
    driver::KernelNode kernel = {};
};

// Returns the node on which the stream's next launch in the capture depends, if that is a single
// node, and the node is a call of this library on this device. Otherwise returns no node. After
// kernels that are not the library's, a programmatic dependent began later than an ordinary launch
// (bench/LOG.md).
CallNode call_before(const KcclGpuQueue& queue, uint64_t stream) {
    int status = driver::kNotCaptured;
    uint64_t id, graph;
    const uint64_t* nodes = nullptr;
    const void* edges = nullptr;
    size_t count = 0;
    const auto capture_info = reinterpret_cast<driver::CaptureInfo>(queue.capture_info);
    if (capture_info(stream, &status, &id, &graph, &nodes, &edges, &count) != 0 || count != 1) {
        return {};
    }
    int type = -1;
    const auto node_type = reinterpret_cast<driver::NodeType>(queue.node_type);
    if (node_type(nodes[0], &type) != 0 || type != driver::kKernelNode) return {};
    CallNode before = {nodes[0]};
    const auto get_params = reinterpret_cast<driver::GetParams>(queue.get_params);
    // The driver's manual does not say what `context` holds. On H200 it is the node's context. If
    // it is anything else than the queue's context, the next call is launched as an ordinary
    // kernel.
    if (get_params(before.node, &before.kernel) != 0 || before.kernel.context != queue.context) {
        return {};
    }
    const auto name_of = reinterpret_cast<driver::FunctionName>(queue.function_name);
    const char* name = nullptr;
    const bool is_own = before.kernel.function != 0 &&
                        name_of(&name, before.kernel.function) == 0 &&
                        strncmp(name, kOwnKernels, strlen(kOwnKernels)) == 0;
    return is_own ? before : CallNode{};
}

// A programmatic dependent may start before the call before it has ended only if each of the two
// would fit on the device at least this many times (KcclCall.fit). With 4, there is room for
// the calls of two streams, each with one call that runs and one that waits for it. KcclCall.fit
// is 0 where this leaves too little room for KCCL_STREAMS streams (kccl/backends/share.py). Calls
// of more streams can block each other, and their waits then time out (DECISIONS.md).
constexpr uint32_t kLeastFit = 4;

// Returns the KcclCall that a call in a graph has as its argument; null if it is not known, because
// there is no such node or the KcclCall is of another version of the library.
const KcclCall* call_of(const CallNode& before) {
    if (before.node == 0 || before.kernel.parameters == nullptr) return nullptr;
    const auto* call = static_cast<const KcclCall*>(before.kernel.parameters[0]);
    return call->comm.abi_version == kKcclAbiVersion ? call : nullptr;
}

// Tells the call before this one in the graph, by changing its argument, whether this call may
// start before it ends (KcclDependent). fit: KcclCall.fit of this call. Returns the driver's code.
// Only calls of this library may come early, because they wait for the end of the call before;
// other kernels may rely on that end without a wait. This call may come early only if both calls
// are small: its blocks, while they wait, take room from calls on other streams, for which a peer
// may be waiting.
int announce_dependent(const KcclGpuQueue& queue, CallNode before, uint32_t fit) {
    const KcclCall* told = call_of(before);
    if (told == nullptr || told->dependent != kKcclNoDependent) return 0;
    KcclCall call = *told;
    const bool are_small = call.fit >= kLeastFit && fit >= kLeastFit;
    call.dependent = are_small ? kKcclEarlyDependent : kKcclLateDependent;
    void* arguments[] = {&call};
    before.kernel.parameters = arguments;
    return reinterpret_cast<driver::SetParams>(queue.set_params)(before.node, &before.kernel);
}

// Decides how to launch a call: as its own graph, or, on a stream that is being captured, as a
// kernel, because a capture cannot contain a launch of a graph. If the driver fails to say whether
// the stream is being captured, returns kKcclLaunchKernel, and that launch then reports the error.
// Stores in *before the call of this library on which this call depends in the capture, if there is
// one.
KcclGpuLaunch how_to_launch(const KcclGpuOp& op, uint64_t stream, CallNode* before) {
    const KcclGpuQueue& queue = *op.queue;
    int status = driver::kNotCaptured;
    const auto is_capturing = reinterpret_cast<driver::IsCapturing>(queue.is_capturing);
    if (is_capturing(stream, &status) != 0) return kKcclLaunchKernel;
    if (status == driver::kNotCaptured) return op.graph ? kKcclLaunchGraph : kKcclLaunchKernel;
    if (status == driver::kCaptured && queue.capture_info != 0)
        *before = call_before(queue, stream);
    if (before->node == 0) return kKcclLaunchKernel;
    // If several calls depend on one call, as after a fork of streams, only the first may come
    // early, and the others are launched as ordinary kernels.
    const KcclCall* told = call_of(*before);
    const bool is_taken = told != nullptr && told->dependent == kKcclEarlyDependent;
    return is_taken ? kKcclLaunchKernel : kKcclLaunchDependent;
}

int launch_as(KcclGpuLaunch how, const KcclGpuOp& op, uint64_t stream) {
    const KcclGpuQueue& queue = *op.queue;
    if (how == kKcclLaunchGraph) {
        return reinterpret_cast<driver::LaunchGraph>(queue.launch_graph)(op.graph, stream);
    }
    KcclCall call;
    kccl_gpu_argument(&op, &call);
    void* arguments[] = {&call};
    if (how == kKcclLaunchDependent) {
        driver::LaunchAttribute dependent = {driver::kStreamSerialization, {}, 1, {}};
        const driver::LaunchConfig config = {
            {op.num_blocks, 1, 1}, {op.threads_per_block, 1, 1}, 0, stream, &dependent, 1};
        const auto launch = reinterpret_cast<driver::LaunchEx>(queue.launch_ex);
        return launch(&config, op.function, arguments, nullptr);
    }
    const auto launch = reinterpret_cast<driver::Launch>(queue.launch);
    return launch(op.function, op.num_blocks, 1, 1, op.threads_per_block, 1, 1, 0, stream,
                  arguments, nullptr);
}

// Launches the call. Returns 0 or the driver's code of an error. Stores an error also in the queue,
// with how the call was launched.
int launch(const KcclGpuOp& op) {
    KcclGpuQueue& queue = *op.queue;
    const uint64_t stream = op.stream;  // read once: another thread may change op.stream meanwhile
    KcclGpuLaunch how = kKcclNoLaunch;
    int device = 0;
    int error = kccl::host::make_current(queue, &device);
    if (error == 0) {
        CallNode before;
        how = how_to_launch(op, stream, &before);
        // Changes the argument of the call before first: if that fails, this call has not been
        // launched, and the caller may try again.
        if (how == kKcclLaunchDependent) {
            error = announce_dependent(queue, before, op.op.call.fit);
            if (error != 0) how = kKcclLaunchAnnounced;
        }
        if (error == 0) error = launch_as(how, op, stream);
        kccl::host::make_previous_current(queue, device);
    }
    if (error != 0) {
        queue.error = error;
        queue.how = how;
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
