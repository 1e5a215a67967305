// The part of a fake CUDA driver that libkccl_nccl.so needs beyond fake_cuda.cpp and
// fake_captures.cpp: devices, modules, launches and copies. A kernel is the library's own, compiled
// for the CPU; a launch runs its blocks one after the other, at once. So a kernel waits for its
// peers within the launch.
#include <cuda.h>
#include <cxxabi.h>
#include <sched.h>
#include <time.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <kccl/kernels/all_gather_direct_ll16.cuh>
#include <kccl/kernels/all_reduce_one_shot_ll16.cuh>
#include <kccl/kernels/all_reduce_one_shot_sentinel.cuh>
#include <kccl/kernels/all_reduce_two_shot_sentinel.cuh>
#include <kccl/kernels/broadcast_direct_ll16.cuh>
#include <kccl/kernels/reduce_scatter_direct_ll16.cuh>
#include <map>
#include <string>

#include "fake_captures.hpp"

using fake::Node;

using Kernel = void (*)(const KcclCall&);

struct fake::Function {
    std::string mangled;
    Kernel kernel;
};

using fake::Function;

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

// With FAKE_CUDA_DIFFERS rank 1 has another GPU than rank 0, and each launch is told.
bool differs() { return std::getenv("FAKE_CUDA_DIFFERS") != nullptr; }
bool is_other() {
    const char* rank = std::getenv("PMI_RANK");
    return differs() && rank != nullptr && std::string(rank) == "1";
}
int multiprocessors() { return is_other() ? 78 : 132; }
// How many blocks have room on a multiprocessor.
int room_for(int threads) {
    const int registers = is_other() ? 100 : 64;
    return std::min(2048 / threads, 65536 / (registers * threads));
}

CUresult launch(CUfunction function, unsigned blocks, unsigned threads, CUstream stream,
                void** arguments) {
    Node node;
    node.function = reinterpret_cast<const Function*>(function);
    node.blocks = blocks;
    node.call = *static_cast<const KcclCall*>(arguments[0]);
    if (differs()) {
        std::fprintf(stderr, "launch: gpu %d: blocks %u, threads %u, fit %u, room %d\n",
                     multiprocessors(), blocks, threads, node.call.fit,
                     room_for(static_cast<int>(threads)));
    }
    return fake::enqueue(node, stream);
}

}  // namespace

void fake::run(const Node& node) {
    if (node.kind == Kind::kLaunch) {
        ::run(*node.function, node.blocks, node.call);
    } else if (node.kind == Kind::kCopy) {
        std::memmove(reinterpret_cast<void*>(node.to), reinterpret_cast<void*>(node.from),
                     node.size);
    }
}

extern "C" {

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
        {CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, multiprocessors()},
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
CUresult cuDeviceGetP2PAttribute(int* value, CUdevice_P2PAttribute, CUdevice, CUdevice) {
    *value = std::getenv("FAKE_CUDA_HAS_NO_NVLINK") == nullptr;
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
CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction, int threads, size_t) {
    *blocks = room_for(threads);
    return CUDA_SUCCESS;
}
CUresult cuLaunchKernel(CUfunction function, unsigned int blocks, unsigned int, unsigned int,
                        unsigned int threads, unsigned int, unsigned int, unsigned int,
                        CUstream stream, void** arguments, void**) {
    return launch(function, blocks, threads, stream, arguments);
}
CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** arguments,
                          void**) {
    fake::count("dependents");
    return launch(function, config->gridDimX, config->blockDimX, config->hStream, arguments);
}

// ---- Copies -------------------------------------------------------------------------------------

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
CUresult cuMemcpyDtoDAsync(CUdeviceptr to, CUdeviceptr from, size_t size, CUstream stream) {
    Node node;
    node.kind = fake::Kind::kCopy;
    node.to = to;
    node.from = from;
    node.size = size;
    return fake::enqueue(node, stream);
}

}  // extern "C"
