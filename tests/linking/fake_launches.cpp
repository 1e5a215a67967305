// The part of a fake CUDA driver that libkccl_nccl.so needs beyond fake_cuda.cpp: devices, modules,
// launches, events and captures. A kernel is the library's own, compiled for the CPU; a launch runs
// its blocks one after the other, at once. So a kernel waits for its peers within the launch.
//
// fake_cuda_count() tells how often streams were made to wait for each other.
#include <cuda.h>
#include <cxxabi.h>
#include <sched.h>
#include <time.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <kccl/kernels/all_gather_direct_ll16.cuh>
#include <kccl/kernels/all_reduce_one_shot_ll16.cuh>
#include <kccl/kernels/all_reduce_one_shot_sentinel.cuh>
#include <kccl/kernels/all_reduce_two_shot_sentinel.cuh>
#include <kccl/kernels/broadcast_direct_ll16.cuh>
#include <kccl/kernels/reduce_scatter_direct_ll16.cuh>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "cuda_driver.h"

namespace driver = kccl::driver;

extern "C" {
uint64_t kccl_host_clock_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}
int kccl_host_read_peer(uint64_t, int, void*, uint64_t, uint64_t) { return -1; }
int kccl_host_may_read_peer(uint64_t, int) { return 0; }
uint32_t kccl_host_idle(uint64_t context, uint64_t, uint32_t, uint32_t* gone) {
    sched_yield();
    *gone = 0;
    // As on a GPU, the context is a mailbox.
    auto* mailbox = reinterpret_cast<KcclMailbox*>(context);
    return __atomic_load_n(&mailbox->interrupted, __ATOMIC_RELAXED) != 0 ? kKcclInterrupted
                                                                         : kKcclOk;
}
}

namespace {

// ---- Kernels ------------------------------------------------------------------------------------

using Kernel = void (*)(const KcclCall&);

template <class T, int WORLD_SIZE>
void add_sums(std::map<std::string, Kernel>& table, const std::string& type) {
    using namespace kccl::kernels;
    const std::string rest = "<" + type + ", kccl::Sum, " + std::to_string(WORLD_SIZE) + ">";
    table["all_reduce_one_shot_ll16" + rest] = all_reduce_one_shot_ll16<T, kccl::Sum, WORLD_SIZE>;
    table["all_reduce_one_shot_sentinel" + rest] =
        all_reduce_one_shot_sentinel<T, kccl::Sum, WORLD_SIZE>;
    table["all_reduce_two_shot_sentinel" + rest] =
        all_reduce_two_shot_sentinel<T, kccl::Sum, WORLD_SIZE>;
    table["reduce_scatter_direct_ll16" + rest] =
        reduce_scatter_direct_ll16<T, kccl::Sum, WORLD_SIZE>;
}

template <int WORLD_SIZE>
void add_all(std::map<std::string, Kernel>& table) {
    add_sums<float, WORLD_SIZE>(table, "float");
    add_sums<kccl::f16, WORLD_SIZE>(table, "kccl::f16");
    add_sums<kccl::bf16, WORLD_SIZE>(table, "kccl::bf16");
    const std::string rest = "<" + std::to_string(WORLD_SIZE) + ">";
    table["all_gather_direct_ll16" + rest] = kccl::kernels::all_gather_direct_ll16<WORLD_SIZE>;
    table["broadcast_direct_ll16" + rest] = kccl::kernels::broadcast_direct_ll16<WORLD_SIZE>;
}

const std::map<std::string, Kernel>& kernels() {
    static const std::map<std::string, Kernel> table = [] {
        std::map<std::string, Kernel> made;
        add_all<2>(made);
        return made;
    }();
    return table;
}

struct Function {
    std::string mangled;
    Kernel kernel;
};

// Returns a kernel's name behind its namespace, as in "all_gather_direct_ll16<2>".
std::string short_name(const char* mangled) {
    int status = 0;
    char* demangled = abi::__cxa_demangle(mangled, nullptr, nullptr, &status);
    if (demangled == nullptr) return "";
    std::string name = demangled;
    std::free(demangled);
    const std::string space = "kccl::kernels::";
    const size_t begin = name.find(space) + space.size();
    return name.substr(begin, name.rfind('(') - begin);
}

void run(const Function& function, unsigned blocks, const KcclCall& call) {
    for (unsigned block = 0; block < blocks; ++block) {
        kccl::host::own_block = {block, blocks};
        function.kernel(call);
    }
    // On a GPU the kernel does this.
    auto* state = reinterpret_cast<KcclState*>(call.comm.state);
    auto* mailbox = reinterpret_cast<KcclMailbox*>(state->idle_context);
    if (state->status == kKcclOk) return;
    mailbox->record = state->record;
    __atomic_store_n(&mailbox->status, state->status, __ATOMIC_RELEASE);
}

// ---- Captures -----------------------------------------------------------------------------------

struct Node {
    const Function* function;
    unsigned blocks, threads;
    KcclCall call;
    void* parameters[1];
};

struct Graph {
    uint64_t id = 0;
    std::vector<Node*> nodes;
};

// Where a stream stands in a capture; graph 0: in none.
struct Place {
    Graph* graph = nullptr;
    std::vector<uint64_t> nodes;
};

std::mutex lock;
std::map<CUstream, Place> places;
std::map<CUevent, Place> events;
std::map<std::string, int> counts;

CUresult launch(uint64_t number, unsigned blocks, unsigned threads, CUstream stream,
                void** arguments) {
    const auto* function = reinterpret_cast<const Function*>(number);
    const KcclCall call = *static_cast<const KcclCall*>(arguments[0]);
    {
        const std::lock_guard held(lock);
        Place& place = places[stream];
        if (place.graph != nullptr) {
            auto* node = new Node{function, blocks, threads, call, {}};
            node->parameters[0] = &node->call;
            place.graph->nodes.push_back(node);
            place.nodes = {reinterpret_cast<uint64_t>(node)};
            return CUDA_SUCCESS;
        }
    }
    run(*function, blocks, call);
    return CUDA_SUCCESS;
}

}  // namespace

extern "C" {

int fake_cuda_count(const char* what) {
    const std::lock_guard held(lock);
    return counts[what];
}

// ---- Devices ------------------------------------------------------------------------------------

CUresult cuDeviceGetCount(int* count) {
    *count = 8;
    return CUDA_SUCCESS;
}
CUresult cuDeviceGet(CUdevice* device, int ordinal) {
    *device = ordinal;
    return CUDA_SUCCESS;
}
CUresult cuDeviceGetAttribute(int* value, CUdevice_attribute attribute, CUdevice) {
    const std::map<CUdevice_attribute, int> known = {
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 9},
        {CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, 0},
        {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 132},
    };
    const auto found = known.find(attribute);
    if (found == known.end()) return CUDA_ERROR_INVALID_VALUE;
    *value = found->second;
    return CUDA_SUCCESS;
}
// Ranks have a GPU each, unless FAKE_CUDA_SHARES_GPU is set.
CUresult cuDeviceGetUuid(CUuuid* uuid, CUdevice ordinal) {
    *uuid = {};
    uuid->bytes[0] = static_cast<char>(std::getenv("FAKE_CUDA_SHARES_GPU") ? 0 : ordinal);
    return CUDA_SUCCESS;
}
CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice) { return cuCtxGetCurrent(context); }
CUresult cuDevicePrimaryCtxRelease(CUdevice) { return CUDA_SUCCESS; }

// ---- Kernels ------------------------------------------------------------------------------------

CUresult cuModuleLoadData(CUmodule* module, const void* code) {
    *module = reinterpret_cast<CUmodule>(const_cast<void*>(code));
    return CUDA_SUCCESS;
}
CUresult cuModuleGetFunction(CUfunction* function, CUmodule, const char* name) {
    const auto found = kernels().find(short_name(name));
    if (found == kernels().end()) return CUDA_ERROR_NOT_FOUND;
    *function = reinterpret_cast<CUfunction>(new Function{name, found->second});
    return CUDA_SUCCESS;
}
CUresult cuFuncLoad(CUfunction) { return CUDA_SUCCESS; }
CUresult cuFuncGetAttribute(int* value, CUfunction_attribute, CUfunction) {
    *value = 512;
    return CUDA_SUCCESS;
}
CUresult cuFuncGetName(const char** name, CUfunction function) {
    *name = reinterpret_cast<Function*>(function)->mangled.c_str();
    return CUDA_SUCCESS;
}
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction, int, size_t) {
    *blocks = 2;
    return CUDA_SUCCESS;
}
CUresult cuLaunchKernel(CUfunction function, unsigned int blocks, unsigned int, unsigned int,
                        unsigned int threads, unsigned int, unsigned int, unsigned int,
                        CUstream stream, void** arguments, void**) {
    return launch(reinterpret_cast<uint64_t>(function), blocks, threads, stream, arguments);
}
CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** arguments,
                          void**) {
    {
        const std::lock_guard held(lock);
        ++counts["dependents"];
    }
    return launch(reinterpret_cast<uint64_t>(function), config->gridDimX, config->blockDimX,
                  config->hStream, arguments);
}

// ---- Copies and order ---------------------------------------------------------------------------

CUresult cuMemAllocManaged(CUdeviceptr* address, size_t size, unsigned int) {
    return cuMemAlloc(address, size);
}
CUresult cuMemcpy(CUdeviceptr to, CUdeviceptr from, size_t size) {
    std::memmove(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), size);
    return CUDA_SUCCESS;
}
CUresult cuMemcpyDtoHAsync(void* to, CUdeviceptr from, size_t size, CUstream) {
    std::memcpy(to, reinterpret_cast<void*>(from), size);
    return CUDA_SUCCESS;
}
CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream) {
    std::memmove(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), size);
    return CUDA_SUCCESS;
}
CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode*) { return CUDA_SUCCESS; }
CUresult cuStreamGetId(CUstream stream, unsigned long long* id) {
    *id = reinterpret_cast<uint64_t>(stream);
    return CUDA_SUCCESS;
}
CUresult cuEventCreate(CUevent* event, unsigned int) {
    *event = static_cast<CUevent>(std::malloc(1));
    return CUDA_SUCCESS;
}
CUresult cuEventDestroy(CUevent event) {
    std::free(event);
    return CUDA_SUCCESS;
}
CUresult cuEventQuery(CUevent) { return CUDA_SUCCESS; }
CUresult cuEventRecord(CUevent event, CUstream stream) {
    const std::lock_guard held(lock);
    events[event] = places[stream];
    return CUDA_SUCCESS;
}
CUresult cuStreamWaitEvent(CUstream stream, CUevent event, unsigned int) {
    const std::lock_guard held(lock);
    ++counts["waits"];
    const Place& recorded = events[event];
    if (recorded.graph == nullptr) return CUDA_SUCCESS;
    Place& place = places[stream];
    place.graph = recorded.graph;
    place.nodes.insert(place.nodes.end(), recorded.nodes.begin(), recorded.nodes.end());
    return CUDA_SUCCESS;
}

CUresult cuStreamBeginCapture(CUstream stream, CUstreamCaptureMode) {
    static uint64_t id = 0;
    const std::lock_guard held(lock);
    places[stream] = {new Graph{++id, {}}, {}};
    return CUDA_SUCCESS;
}
CUresult cuStreamEndCapture(CUstream stream, CUgraph* graph) {
    const std::lock_guard held(lock);
    Graph* captured = places[stream].graph;
    *graph = reinterpret_cast<CUgraph>(captured);
    for (auto& each : places) {
        if (each.second.graph == captured) each.second = {};
    }
    return CUDA_SUCCESS;
}
CUresult cuStreamIsCapturing(CUstream stream, CUstreamCaptureStatus* status) {
    const std::lock_guard held(lock);
    *status = places[stream].graph != nullptr ? CU_STREAM_CAPTURE_STATUS_ACTIVE
                                              : CU_STREAM_CAPTURE_STATUS_NONE;
    return CUDA_SUCCESS;
}

// The library knows these by their types without cuda.h (csrc/host/cuda_driver.h).
#define FAKE_CUDA_NAME(name) __asm__(#name)
int capture_info(CUstream stream, int* status, uint64_t* id, uint64_t* graph,
                 const uint64_t** nodes, const void** edges, size_t* count)
    FAKE_CUDA_NAME(cuStreamGetCaptureInfo_v3);
int add_dependencies(CUstream, const uint64_t* nodes, const void*, size_t count, unsigned int)
    FAKE_CUDA_NAME(cuStreamUpdateCaptureDependencies_v2);
int node_type(uint64_t, int* type) FAKE_CUDA_NAME(cuGraphNodeGetType);
int get_params(uint64_t number, driver::KernelNode* filled)
    FAKE_CUDA_NAME(cuGraphKernelNodeGetParams_v2);
int set_params(uint64_t number, const driver::KernelNode* params)
    FAKE_CUDA_NAME(cuGraphKernelNodeSetParams_v2);

int capture_info(CUstream stream, int* status, uint64_t* id, uint64_t* graph,
                 const uint64_t** nodes, const void** edges, size_t* count) {
    const std::lock_guard held(lock);
    const Place& place = places[stream];
    *status = place.graph != nullptr ? driver::kCaptured : driver::kNotCaptured;
    if (place.graph == nullptr) return 0;
    *id = place.graph->id;
    *graph = reinterpret_cast<uint64_t>(place.graph);
    *nodes = place.nodes.data();
    *edges = nullptr;
    *count = place.nodes.size();
    return 0;
}
int add_dependencies(CUstream stream, const uint64_t* nodes, const void*, size_t count,
                     unsigned int) {
    const std::lock_guard held(lock);
    ++counts["edges"];
    Place& place = places[stream];
    place.nodes.insert(place.nodes.end(), nodes, nodes + count);
    return 0;
}
int node_type(uint64_t, int* type) {
    *type = driver::kKernelNode;
    return 0;
}
int get_params(uint64_t number, driver::KernelNode* filled) {
    auto* node = reinterpret_cast<Node*>(number);
    CUcontext context = nullptr;
    cuCtxGetCurrent(&context);
    *filled = {};
    filled->function = reinterpret_cast<uint64_t>(node->function);
    filled->context = reinterpret_cast<uint64_t>(context);
    filled->parameters = node->parameters;
    return 0;
}
int set_params(uint64_t number, const driver::KernelNode* params) {
    auto* node = reinterpret_cast<Node*>(number);
    node->call = *static_cast<const KcclCall*>(params->parameters[0]);
    return 0;
}
CUresult cuGraphInstantiate(CUgraphExec* made, CUgraph graph, unsigned long long) {
    *made = reinterpret_cast<CUgraphExec>(graph);
    return CUDA_SUCCESS;
}
CUresult cuGraphLaunch(CUgraphExec made, CUstream) {
    for (const Node* node : reinterpret_cast<const Graph*>(made)->nodes) {
        run(*node->function, node->blocks, node->call);
    }
    return CUDA_SUCCESS;
}

}  // extern "C"
