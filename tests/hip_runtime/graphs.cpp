// Captures and graphs.
#include <algorithm>

#include "runtime.h"

namespace hip_runtime {
namespace {

constexpr int kHipStreamCaptureModeRelaxed = 2;

// hipKernelNodeParams
struct KernelNode {
    uint32_t block[3];
    void** extra;
    Function* function;
    uint32_t grid[3];
    void** arguments;
    uint32_t shared_bytes;
};

thread_local int capture_mode = 0;
thread_local std::vector<Stream*> captures;  // that this thread has begun

}  // namespace

bool spoil(Stream& stream) {
    if (!stream.capture) return false;
    stream.capture->is_valid = false;
    return true;
}

bool is_forbidden_by_capture() {
    if (capture_mode == kHipStreamCaptureModeRelaxed) return false;
    bool is_forbidden = false;
    for (Stream* each : captures) {
        if (each->capture->mode == kHipStreamCaptureModeRelaxed) continue;
        is_forbidden = spoil(*each);
    }
    return is_forbidden;
}

}  // namespace hip_runtime

using namespace hip_runtime;

HIP_API int hipThreadExchangeStreamCaptureMode(int* mode) {
    HIP_MAY_FAIL();
    std::swap(*mode, capture_mode);
    return kHipSuccess;
}

HIP_API int hipStreamIsCapturing(uint64_t handle, int* status) {
    HIP_MAY_FAIL();
    Stream* const stream = stream_of(handle);
    if (stream == nullptr) return kHipErrorInvalidHandle;
    *status = !stream->capture ? 0 : stream->capture->is_valid ? 1 : 2;
    return kHipSuccess;
}

HIP_API int hipStreamBeginCapture(uint64_t handle, int mode) {
    HIP_MAY_FAIL();
    Stream* const stream = stream_of(handle);
    if (stream == nullptr || handle == 0) return kHipErrorStreamCaptureUnsupported;
    stream->capture = std::make_unique<Capture>();
    stream->capture->mode = mode;
    captures.push_back(stream);
    return kHipSuccess;
}

HIP_API int hipStreamEndCapture(uint64_t handle, Graph** graph) {
    HIP_MAY_FAIL();
    Stream* const stream = stream_of(handle);
    if (stream == nullptr || !stream->capture) return kHipErrorInvalidHandle;
    const std::unique_ptr<Capture> capture = std::move(stream->capture);
    captures.erase(std::find(captures.begin(), captures.end(), stream));
    if (!capture->is_valid) return kHipErrorStreamCaptureInvalidated;
    *graph = new Graph(std::move(capture->graph));
    return kHipSuccess;
}

HIP_API int hipGraphCreate(Graph** graph, unsigned) {
    HIP_MAY_FAIL();
    *graph = new Graph;
    return kHipSuccess;
}

HIP_API int hipGraphAddKernelNode(void** node, Graph* graph, void* const*, size_t,
                                  const KernelNode* given) {
    HIP_MAY_FAIL();
    Shape shape;
    std::copy_n(given->grid, 3, shape.grid);
    std::copy_n(given->block, 3, shape.block);
    shape.shared_bytes = given->shared_bytes;
    Work work;
    const int error = kernel_work(given->function, shape, given->arguments, &work);
    if (error != kHipSuccess) return error;
    graph->nodes.push_back(std::move(work));
    *node = &graph->nodes.back();
    return kHipSuccess;
}

HIP_API int hipGraphInstantiateWithFlags(Graph** instance, Graph* graph, unsigned long long) {
    HIP_MAY_FAIL();
    *instance = new Graph(*graph);
    return kHipSuccess;
}

HIP_API int hipGraphLaunch(Graph* instance, uint64_t handle) {
    HIP_MAY_FAIL();
    Stream* const stream = stream_of(handle);
    if (stream == nullptr) return kHipErrorInvalidHandle;
    // Graphs inside of graphs are not for this runtime.
    if (spoil(*stream)) return kHipErrorStreamCaptureUnsupported;
    for (const Work& work : instance->nodes) {
        const int error = enqueue(*stream, work);
        if (error != kHipSuccess) return error;
    }
    return kHipSuccess;
}

HIP_API int hipGraphDestroy(Graph* graph) {
    HIP_MAY_FAIL();
    delete graph;
    return kHipSuccess;
}

HIP_API int hipGraphExecDestroy(Graph* instance) {
    HIP_MAY_FAIL();
    delete instance;
    return kHipSuccess;
}
