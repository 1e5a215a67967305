// Starts a rank, and launches its calls.
//
// Calls outside of captures use channel 0, and calls that are captured channel 1: so a graph and
// other calls may run at the same time. NCCL demands that all ranks capture a call or none does.
// Calls of one channel run one after the other, whatever their streams: an event orders those
// outside of captures, and an edge those of one capture. Nothing orders two graphs that a program
// launches at the same time.
#include "served.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "../host/cuda_driver.h"
#include "driver.h"
#include "images.h"
#include "real.h"

namespace kccl::nccl {

// What a stream's next launch depends on in a capture.
struct Capture {
    int status = driver::kNotCaptured;
    uint64_t id = 0;
    std::vector<uint64_t> nodes;
    std::vector<uint64_t> edges;  // the CUgraphEdgeData from each node; 0: from its end
};

namespace {

#include "sizes.inc"

constexpr int kEagerChannel = 0, kCapturedChannel = 1;
constexpr uint32_t kChannels = 2;
constexpr double kStartS = 60;  // how long a rank waits for the others' memory
constexpr int kHopper = 9;      // the first architecture that launches programmatic dependents

template <class Function>
Function find(const char* name) {
    return reinterpret_cast<Function>(driver_function(name));
}

uint64_t address_of(void* function) { return reinterpret_cast<uint64_t>(function); }

// From CUDA 12.3 on these functions tell which edges of a graph are programmatic.
using CaptureInfo = driver::CaptureInfo;
using UpdateDependencies = CUresult (*)(CUstream, const uint64_t* nodes, const uint64_t* edges,
                                        size_t count, unsigned flags);
using Dependencies = CUresult (*)(uint64_t node, uint64_t* nodes, uint64_t* edges, size_t* count);
using StreamId = CUresult (*)(CUstream, unsigned long long* id);

CaptureInfo capture_info() {
    static const auto found = find<CaptureInfo>("cuStreamGetCaptureInfo_v3");
    return found;
}

CUresult look(CUstream stream, Capture* capture) {
    uint64_t graph;
    const uint64_t* nodes = nullptr;
    const void* edges = nullptr;
    size_t count = 0;
    const auto code =
        static_cast<CUresult>(capture_info()(reinterpret_cast<uint64_t>(stream), &capture->status,
                                             &capture->id, &graph, &nodes, &edges, &count));
    if (code != CUDA_SUCCESS || capture->status != driver::kCaptured) return code;
    capture->nodes.assign(nodes, nodes + count);
    capture->edges.assign(count, 0);
    if (edges != nullptr) std::memcpy(capture->edges.data(), edges, count * sizeof(uint64_t));
    return code;
}

// Returns the number of a stream, because two streams may have one handle, one after the other. The
// driver must not be asked for that of a stream that is being captured: this ends the capture.
CUresult id_of(CUstream stream, uint64_t* id) {
    static const auto find_id = find<StreamId>("cuStreamGetId");
    if (find_id == nullptr) return CUDA_ERROR_NOT_SUPPORTED;
    unsigned long long number = 0;
    const CUresult code = find_id(stream, &number);
    *id = number;
    return code;
}

// Tells whether a launch that depends on these nodes comes after the last call. "No" may be wrong:
// the search has an end, because a graph may have many nodes.
bool come_after(const Captured& captured, std::vector<uint64_t> nodes) {
    static const auto dependencies = find<Dependencies>("cuGraphNodeGetDependencies_v2");
    constexpr size_t kMostNodes = 256, kMostEdges = 16;
    for (size_t i = 0; i < nodes.size() && i < kMostNodes; ++i) {
        if (nodes[i] == captured.last) return true;
        if (captured.calls.contains(nodes[i])) continue;
        uint64_t before[kMostEdges], edges[kMostEdges];
        size_t count = kMostEdges;
        if (dependencies(nodes[i], before, edges, &count) != CUDA_SUCCESS) return false;
        for (size_t j = 0; j < std::min(count, kMostEdges); ++j) {
            // Behind another edge a kernel may come before that node's end.
            const bool is_new = std::ranges::find(nodes, before[j]) == nodes.end();
            if (edges[j] == 0 && is_new) nodes.push_back(before[j]);
        }
    }
    return false;
}

// Lets the stream's next launch come after the last call, by few edges: none from earlier calls,
// and one from the last call only where nothing else comes after it. A launch with a single edge,
// from a call, is a programmatic dependent. PyTorch's streams wait for each other around each call,
// so they depend on all calls before.
CUresult order(const Captured& captured, CUstream stream, const Capture& capture) {
    static const auto update = find<UpdateDependencies>("cuStreamUpdateCaptureDependencies_v2");
    std::vector<uint64_t> nodes, edges, ended;
    for (size_t i = 0; i < capture.nodes.size(); ++i) {
        if (captured.calls.contains(capture.nodes[i])) continue;
        nodes.push_back(capture.nodes[i]);
        edges.push_back(capture.edges[i]);
        if (edges.back() == 0) ended.push_back(nodes.back());
    }
    if (!come_after(captured, ended)) {
        nodes.push_back(captured.last);
        edges.push_back(0);
    }
    if (nodes == capture.nodes) return CUDA_SUCCESS;
    return update(stream, nodes.data(), edges.data(), nodes.size(),
                  CU_STREAM_SET_CAPTURE_DEPENDENCIES);
}

bool has_dependents(const host::Team& team) {
    const char* told = std::getenv("KCCL_DEPENDENTS");
    int major = 0;
    team.must(
        "cuDeviceGetAttribute",
        cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, team.device()));
    return major >= kHopper && (told == nullptr || std::string(told) != "0");
}

}  // namespace

Served::Served(int rank, int world_size, uint64_t id, double limit_s,
               host::Team::Allgather allgather)
    : id_(id) {
    // have_ended() has been asked before memory is freed.
    team_ = std::make_unique<host::Team>(rank, world_size, std::move(allgather), [] {});
    team_->together([&] {
        if (capture_info() == nullptr) throw host::Error("CUDA's driver is older than 12.3");
        load_kernels(*team_, world_size);
    });
    KcclSizes sizes = kSizes;
    sizes.num_channels = kChannels;
    communicator_ = std::make_unique<host::Communicator>(*team_, sizes, kStartS, limit_s);
    team_->together([&] {
        queue_.launch = address_of(driver_function("cuLaunchKernel"));
        queue_.is_capturing = address_of(driver_function("cuStreamIsCapturing"));
        queue_.push_context = address_of(driver_function("cuCtxPushCurrent_v2"));
        queue_.pop_context = address_of(driver_function("cuCtxPopCurrent_v2"));
        queue_.context = reinterpret_cast<uint64_t>(team_->context());
        queue_.state = communicator_->device_comm().state;
        queue_.mailbox = communicator_->mailbox();
        if (has_dependents(*team_)) {
            queue_.launch_ex = address_of(driver_function("cuLaunchKernelEx"));
            queue_.capture_info = address_of(driver_function("cuStreamGetCaptureInfo_v3"));
            queue_.node_type = address_of(driver_function("cuGraphNodeGetType"));
            queue_.get_params = address_of(driver_function("cuGraphKernelNodeGetParams_v2"));
            queue_.set_params = address_of(driver_function("cuGraphKernelNodeSetParams_v2"));
            queue_.function_name = address_of(driver_function("cuFuncGetName"));
        }
        team_->must(
            "cuDeviceGetAttribute",
            cuDeviceGetAttribute(&multiprocessors_, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
                                 team_->device()));
        team_->must("cuEventCreate", cuEventCreate(&last_call_, CU_EVENT_DISABLE_TIMING));
    });
}

Served::~Served() {
    const host::Current here(*team_);
    if (last_call_ != nullptr) cuEventDestroy(last_call_);
    communicator_.reset();
}

// ---- Calls --------------------------------------------------------------------------------------

uint32_t Served::fit_of(uint64_t function, const Shape& shape) {
    const auto [room, is_new] = rooms_.try_emplace({function, shape.threads}, 0);
    if (is_new) {
        int blocks = 0;
        const auto code = cuOccupancyMaxActiveBlocksPerMultiprocessor(
            &blocks, reinterpret_cast<CUfunction>(function), static_cast<int>(shape.threads), 0);
        // Without an answer the call admits no dependent early.
        if (code == CUDA_SUCCESS) room->second = static_cast<uint32_t>(blocks * multiprocessors_);
    }
    return room->second / shape.blocks;
}

KcclGpuOp Served::op_of(const Choice& choice, const Arguments& arguments, int channel) {
    const Loaded kernel = loaded(*team_, *choice.kernel, choice.dtype);
    const Shape shape = shape_of(choice, kernel.most_threads);
    KcclGpuOp op = {};
    op.queue = &queue_;
    op.function = kernel.function;
    op.stream = reinterpret_cast<uint64_t>(arguments.stream);
    op.num_blocks = shape.blocks;
    op.threads_per_block = shape.threads;
    KcclCall& call = op.op.call;
    call.comm = communicator_->device_comm();
    call.comm.state = reinterpret_cast<uint64_t>(&state_);
    call.output = reinterpret_cast<uint64_t>(arguments.out);
    // Only the root of a broadcast has an input.
    const bool has_input =
        choice.kernel->number != kKcclBroadcastDirectLl16 || arguments.root == rank();
    call.input = reinterpret_cast<uint64_t>(has_input ? arguments.in : arguments.out);
    call.count = choice.count;
    call.kernel = choice.kernel->number;
    call.dtype = choice.dtype;
    call.op = kKcclSum;
    call.peer = arguments.root;
    call.channel = channel;
    call.share = shape.share;
    call.fit = fit_of(kernel.function, shape);
    return op;
}

CUresult Served::run(KcclGpuOp& op) {
    kccl_gpu_run_op(&op.op.call);
    if (queue_.error == 0) return CUDA_SUCCESS;
    // The launch may be tried again.
    state_.status = kKcclOk;
    return static_cast<CUresult>(std::exchange(queue_.error, 0u));
}

CUresult Served::launch_eager(KcclGpuOp& op, CUstream stream) {
    uint64_t stream_id = 0;
    CUresult code = id_of(stream, &stream_id);
    if (code == CUDA_SUCCESS && has_called_ && stream_id != last_stream_id_) {
        code = cuStreamWaitEvent(stream, last_call_, 0);
    }
    if (code == CUDA_SUCCESS) code = run(op);
    if (code == CUDA_SUCCESS) code = cuEventRecord(last_call_, stream);
    has_called_ = true;
    last_stream_id_ = stream_id;
    return code;
}

CUresult Served::launch_captured(KcclGpuOp& op, CUstream stream, const Capture& capture) {
    has_captured_ = true;
    if (captured_.id != capture.id) captured_ = {capture.id, 0, {}};
    CUresult code = captured_.last != 0 ? order(captured_, stream, capture) : CUDA_SUCCESS;
    if (code == CUDA_SUCCESS) code = run(op);
    Capture after;
    if (code == CUDA_SUCCESS) code = look(stream, &after);
    if (code == CUDA_SUCCESS && after.nodes.size() == 1) {
        captured_.last = after.nodes[0];
        captured_.calls.insert(captured_.last);
    }
    return code;
}

CUresult Served::launch(const Choice& choice, const Arguments& arguments) {
    const host::Current here(*team_);
    Capture capture;
    CUresult code = look(arguments.stream, &capture);
    if (code != CUDA_SUCCESS) return code;
    const bool is_captured = capture.status == driver::kCaptured;
    if (!is_captured && capture.status != driver::kNotCaptured) {
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    }
    KcclGpuOp op = op_of(choice, arguments, is_captured ? kCapturedChannel : kEagerChannel);
    code = is_captured ? launch_captured(op, arguments.stream, capture)
                       : launch_eager(op, arguments.stream);
    // The kernel does not write the root's own result.
    const bool copies = choice.kernel->number == kKcclBroadcastDirectLl16 &&
                        arguments.root == rank() && arguments.in != arguments.out;
    if (code == CUDA_SUCCESS && copies) {
        code = cuMemcpyDtoDAsync(reinterpret_cast<CUdeviceptr>(arguments.out),
                                 reinterpret_cast<CUdeviceptr>(arguments.in), choice.peer_bytes,
                                 arguments.stream);
    }
    return code;
}

ncclResult_t Served::call(const Choice& choice, const Arguments& arguments) {
    const std::lock_guard held(calls_);
    const CUresult code = status() == kKcclOk ? launch(choice, arguments) : CUDA_SUCCESS;
    if (status() != kKcclOk) {
        own_error() = error();
        return ncclRemoteError;
    }
    if (code == CUDA_SUCCESS) return ncclSuccess;
    own_error() = std::string(choice.kernel->name) + " was not launched: " + name_of_error(code);
    return ncclUnhandledCudaError;
}

// ---- Failure and end ----------------------------------------------------------------------------

std::string Served::error() const {
    return status() != kKcclOk ? host::sentence(queue_.mailbox->record, rank()) : "";
}

void Served::interrupt() {
    std::atomic_ref<uint32_t>(queue_.mailbox->interrupted).store(1, std::memory_order_relaxed);
}

bool Served::have_ended(double limit_s, bool waits_for_graphs) {
    const host::Current here(*team_);
    if (has_captured_) return waits_for_graphs && cuCtxSynchronize() == CUDA_SUCCESS;
    if (!has_called_) return true;
    using Clock = std::chrono::steady_clock;
    const auto until = Clock::now() + std::chrono::duration<double>(limit_s);
    for (;;) {
        const CUresult code = cuEventQuery(last_call_);
        if (code != CUDA_ERROR_NOT_READY) return code == CUDA_SUCCESS;
        if (Clock::now() > until) return false;
        std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
}

}  // namespace kccl::nccl
