// Starts a rank, and launches its calls.
//
// Calls outside of captures use channel 0, and calls that are captured channel 1: so a graph and
// other calls may run at the same time. NCCL demands that all ranks capture a call or none does.
// Calls of one channel run one after the other, whatever their streams: an event orders those
// outside of captures, and captures.h has the order of the others. NCCL's own calls on the
// communicator have their place in the same order.
#include "served.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <thread>

#include "../host/cuda_driver.h"
#include "driver.h"
#include "real.h"

namespace kccl::nccl {

namespace {

#include "sizes.inc"

constexpr int kEagerChannel = 0, kCapturedChannel = 1;
constexpr uint32_t kChannels = 2;
constexpr double kStartS = 60;  // how long a rank waits for the others' memory

uint64_t address_of(void* function) { return reinterpret_cast<uint64_t>(function); }

using StreamId = CUresult (*)(CUstream, unsigned long long* id);

// Returns the number of a stream, because two streams may have one handle, one after the other. The
// driver must not be asked for that of a stream that is being captured: this ends the capture.
CUresult id_of(CUstream stream, uint64_t* id) {
    static const auto find_id = reinterpret_cast<StreamId>(driver_function("cuStreamGetId"));
    if (find_id == nullptr) return CUDA_ERROR_NOT_SUPPORTED;
    unsigned long long number = 0;
    const CUresult code = find_id(stream, &number);
    *id = number;
    return code;
}

// Returns NCCL's result for the driver's, and notes an error as this thread's.
ncclResult_t result_of(const char* who, const char* what, CUresult code) {
    if (code == CUDA_SUCCESS) return ncclSuccess;
    own_error() = std::string(who) + what + ": " + name_of_error(code);
    return ncclUnhandledCudaError;
}

// Makes the bounds of all ranks' GPUs this rank's: what a block may have of threads, and a call of
// blocks.
void agree_on_bounds(const host::Team& team, std::map<KernelKey, Loaded>& kernels,
                     uint32_t& multiprocessors) {
    constexpr size_t kMostKernels = 64;
    std::array<uint32_t, kMostKernels + 1> mine = {multiprocessors};
    team.together([&] {
        if (kernels.size() > kMostKernels) throw host::Error("there are too many kernels");
    });
    size_t number = 0;
    for (const auto& kernel : kernels) mine[++number] = kernel.second.most_threads;
    for (const auto& theirs : team.allgather(mine)) {
        multiprocessors = std::min(multiprocessors, theirs[0]);
        number = 0;
        for (auto& kernel : kernels) {
            uint32_t& most = kernel.second.most_threads;
            most = std::min(most, theirs[++number]);
        }
    }
}

bool has_dependents(const host::Team& team) {
    const char* told = std::getenv("KCCL_DEPENDENTS");
    int major = 0;
    team.must(
        "cuDeviceGetAttribute",
        cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, team.device()));
    return major >= kDependentsMajor && (told == nullptr || std::string(told) != "0");
}

}  // namespace

Served::Served(int rank, int world_size, double limit_s, host::Team::Allgather allgather) {
    // have_ended() has been asked before memory is freed.
    team_ = std::make_unique<host::Team>(rank, world_size, std::move(allgather), [] {});
    team_->together([&] {
        if (!can_look()) throw host::Error("CUDA's driver is older than 12.3");
        kernels_ = load_kernels(*team_, world_size);
        int number = 0;
        team_->must("cuDeviceGetAttribute",
                    cuDeviceGetAttribute(&number, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT,
                                         team_->device()));
        multiprocessors_ = static_cast<uint32_t>(number);
    });
    agree_on_bounds(*team_, kernels_, multiprocessors_);
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
        team_->must("cuEventCreate", cuEventCreate(&last_call_, CU_EVENT_DISABLE_TIMING));
        team_->must("cuEventCreate", cuEventCreate(&joined_, CU_EVENT_DISABLE_TIMING));
        team_->must("cuEventCreate", captures_.start());
    });
}

Served::~Served() {
    const Uncaptured uncaptured;
    const host::Current here(*team_);
    if (last_call_ != nullptr) cuEventDestroy(last_call_);
    if (joined_ != nullptr) cuEventDestroy(joined_);
    captures_.end();
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
        if (code == CUDA_SUCCESS) room->second = static_cast<uint32_t>(blocks);
    }
    // A call that is large and admits its dependent leaves no room for another communicator's call.
    const bool is_small = room->second >= 2 * kAtOnce || 2 * shape.blocks <= multiprocessors_;
    return is_small ? room->second * multiprocessors_ / shape.blocks : 0;
}

const Loaded& Served::kernel_of(const Choice& choice) const {
    return kernels_.at({choice.kernel->number, choice.dtype});
}

KcclGpuOp Served::op_of(const Choice& choice, const Arguments& arguments, int channel) {
    const Loaded& kernel = kernel_of(choice);
    const Shape shape = shape_of(choice, kernel.most_threads, multiprocessors_);
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
    const bool has_input = !choice.has_root || arguments.root == rank();
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

CUresult Served::begin_eager(CUstream stream) {
    uint64_t stream_id = 0;
    CUresult code = id_of(stream, &stream_id);
    if (code == CUDA_SUCCESS && has_called_ && stream_id != last_stream_id_) {
        code = cuStreamWaitEvent(stream, last_call_, 0);
    }
    if (code == CUDA_SUCCESS) last_stream_id_ = stream_id;
    return code;
}

// The event is recorded at once, because the stream may be gone when another one has to wait.
CUresult Served::end_eager(CUstream stream) {
    has_called_ = true;
    return cuEventRecord(last_call_, stream);
}

CUresult Served::copy_of_root(const Choice& choice, const Arguments& arguments) {
    const bool copies =
        choice.has_root && arguments.root == rank() && arguments.in != arguments.out;
    if (!copies) return CUDA_SUCCESS;
    return cuMemcpyDtoDAsync(reinterpret_cast<CUdeviceptr>(arguments.out),
                             reinterpret_cast<CUdeviceptr>(arguments.in), choice.peer_bytes,
                             arguments.stream);
}

CUresult Served::launch_eager(KcclGpuOp& op, const Choice& choice, const Arguments& arguments) {
    CUresult code = begin_eager(arguments.stream);
    if (code == CUDA_SUCCESS) code = run(op);
    if (code == CUDA_SUCCESS) code = copy_of_root(choice, arguments);
    return code == CUDA_SUCCESS ? end_eager(arguments.stream) : code;
}

CUresult Served::launch_captured(KcclGpuOp& op, CUstream stream, const Capture& capture) {
    CUresult code = captures_.before(stream, capture);
    if (code == CUDA_SUCCESS) code = run(op);
    return code == CUDA_SUCCESS ? captures_.after(stream, capture) : code;
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
    if (!is_captured) return launch_eager(op, choice, arguments);
    code = launch_captured(op, arguments.stream, capture);
    // The graph's record need not wait for the copy, which no other rank sees.
    return code == CUDA_SUCCESS ? copy_of_root(choice, arguments) : code;
}

ncclResult_t Served::call(const Choice& choice, const Arguments& arguments) {
    const std::lock_guard held(calls_);
    if (is_closed_) {
        own_error() = "the communicator has been destroyed or aborted";
        return ncclInvalidUsage;
    }
    const CUresult code = status() == kKcclOk ? launch(choice, arguments) : CUDA_SUCCESS;
    if (status() != kKcclOk) {
        own_error() = error();
        return ncclRemoteError;
    }
    if (code == CUDA_SUCCESS) own_error().clear();
    return result_of(choice.kernel->name, " was not launched", code);
}

ncclResult_t Served::before_passing(CUstream stream) {
    const std::lock_guard held(calls_);
    const host::Current here(*team_);
    Capture capture;
    CUresult code = look(stream, &capture);
    // NCCL says what is wrong with the stream.
    if (code != CUDA_SUCCESS || is_closed_) return ncclSuccess;
    if (capture.status == driver::kNotCaptured) code = begin_eager(stream);
    return result_of("a stream", " did not wait for the call before", code);
}

ncclResult_t Served::after_passing(CUstream stream) {
    const std::lock_guard held(calls_);
    const host::Current here(*team_);
    Capture capture;
    CUresult code = look(stream, &capture);
    if (code != CUDA_SUCCESS || is_closed_) return ncclSuccess;
    if (capture.status == driver::kNotCaptured) code = end_eager(stream);
    return result_of("a call's event", " was not recorded", code);
}

ncclResult_t Served::join(CUstream later, CUstream earlier) {
    const std::lock_guard held(calls_);
    if (is_closed_ || later == earlier) return ncclSuccess;
    const host::Current here(*team_);
    CUresult code = cuEventRecord(joined_, earlier);
    if (code == CUDA_SUCCESS) code = cuStreamWaitEvent(later, joined_, 0);
    return result_of("a stream", " did not wait for another one", code);
}

// ---- Failure and end ----------------------------------------------------------------------------

std::string Served::error() const {
    return status() != kKcclOk ? host::sentence(queue_.mailbox->record, rank()) : "";
}

void Served::interrupt() {
    std::atomic_ref<uint32_t>(queue_.mailbox->interrupted).store(1, std::memory_order_relaxed);
}

void Served::close() {
    const std::lock_guard held(calls_);
    is_closed_ = true;
}

bool Served::have_ended(double limit_s) {
    const Uncaptured uncaptured;
    const host::Current here(*team_);
    using Clock = std::chrono::steady_clock;
    const auto until = Clock::now() + std::chrono::duration<double>(limit_s);
    for (;;) {
        // After a failure there is nothing to wait for.
        if (status() != kKcclOk) interrupt();
        CUresult code = has_called_ ? cuEventQuery(last_call_) : CUDA_SUCCESS;
        if (code == CUDA_SUCCESS) code = captures_.query();
        if (code != CUDA_ERROR_NOT_READY) return code == CUDA_SUCCESS;
        if (Clock::now() > until) return false;
        std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
}

}  // namespace kccl::nccl
