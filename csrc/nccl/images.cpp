// Loads kernels from the images that the build has embedded: a file of each kernel for each
// architecture, with its instances for element types and numbers of ranks.
#include "images.h"

#include <cuda.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <string>
#include <tuple>

#include "driver.h"
#include "image_bytes.inc"
#include "plan.h"

namespace kccl::nccl {

namespace {

struct Image {
    uint32_t kernel;   // KcclKernel
    int major, minor;  // the compute capability for which it was compiled
    bool is_exact;     // it runs on no other
    bool is_ptx;       // the driver compiles it
    const unsigned char* code;
};

struct Instance {
    uint32_t kernel;  // KcclKernel
    uint32_t dtype;   // KcclDtype
    int world_size;
    const char* name;  // as the compiler mangles it
};

#include "images.inc"

// The modules on all devices, by context and kernel. They stay loaded, and the table is never
// destroyed: a thread may start a communicator while the process ends.
std::mutex lock;
auto& modules = *new std::map<std::pair<CUcontext, uint32_t>, CUmodule>;

// Code for the device's own compute capability or for an older minor one, else PTX.
bool runs_on(const Image& image, int major, int minor) {
    const std::pair wanted(image.major, image.minor), here(major, minor);
    if (image.is_ptx || image.is_exact) return image.is_ptx ? wanted <= here : wanted == here;
    return image.major == major && image.minor <= minor;
}

const Image* image_for(uint32_t kernel, int major, int minor) {
    const Image* best = nullptr;
    for (const Image& image : kImages) {
        if (image.kernel != kernel || !runs_on(image, major, minor)) continue;
        const bool is_better =
            best == nullptr || std::tuple(best->is_ptx, image.major, image.minor) >
                                   std::tuple(image.is_ptx, best->major, best->minor);
        if (is_better) best = &image;
    }
    return best;
}

CUmodule module_of(const host::Team& team, uint32_t kernel) {
    CUmodule& module = modules[{team.context(), kernel}];
    if (module != nullptr) return module;
    int major = 0, minor = 0;
    team.must(
        "cuDeviceGetAttribute",
        cuDeviceGetAttribute(&major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, team.device()));
    team.must(
        "cuDeviceGetAttribute",
        cuDeviceGetAttribute(&minor, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR, team.device()));
    const Image* image = image_for(kernel, major, minor);
    if (image == nullptr) {
        throw host::Error("KCCL has no kernels for compute capability " + std::to_string(major) +
                          "." + std::to_string(minor) + " on " + team.who());
    }
    team.must("cuModuleLoadData", cuModuleLoadData(&module, image->code));
    return module;
}

// Returns the most threads of a block of which enough are on a multiprocessor at once.
uint32_t most_threads_of(const host::Team& team, CUfunction function) {
    int threads = 0, blocks = 0;
    team.must("cuFuncGetAttribute",
              cuFuncGetAttribute(&threads, CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, function));
    const int unit = static_cast<int>(warp_size());
    for (threads = std::min(threads, static_cast<int>(most_threads())); threads >= unit;
         threads -= unit) {
        team.must("cuOccupancyMaxActiveBlocksPerMultiprocessor",
                  cuOccupancyMaxActiveBlocksPerMultiprocessor(&blocks, function, threads, 0));
        if (blocks >= kAtOnce) return static_cast<uint32_t>(threads);
    }
    throw host::Error("a multiprocessor of " + team.who() + " has no room for two blocks");
}

}  // namespace

std::map<KernelKey, Loaded> load_kernels(const host::Team& team, int world_size) {
    const std::lock_guard held(lock);
    // CUDA has it from 12.4 on; before, the first launch loads a kernel.
    const auto load_now = reinterpret_cast<CUresult (*)(CUfunction)>(driver_function("cuFuncLoad"));
    std::map<KernelKey, Loaded> kernels;
    for (const Instance& instance : kInstances) {
        if (instance.world_size != world_size) continue;
        CUfunction function = nullptr;
        team.must("cuModuleGetFunction",
                  cuModuleGetFunction(&function, module_of(team, instance.kernel), instance.name));
        if (load_now != nullptr) team.must("cuFuncLoad", load_now(function));
        kernels[{instance.kernel, instance.dtype}] = {reinterpret_cast<uint64_t>(function),
                                                      most_threads_of(team, function)};
    }
    return kernels;
}

}  // namespace kccl::nccl
