// Defines the driver's functions that this library calls. The build lists them (driver.inc): their
// names, and what cuda.h declares. They are hidden, so nobody else calls them.
#include "driver.h"

#include <cuda.h>
#include <dlfcn.h>

namespace kccl::nccl {

void* driver_function(const char* name) {
    static void* const driver = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_LOCAL);
    return driver == nullptr ? nullptr : dlsym(driver, name);
}

std::string name_of_error(int code) {
    const char* name = nullptr;
    cuGetErrorName(static_cast<CUresult>(code), &name);
    return std::string(name != nullptr ? name : "?") + " (" + std::to_string(code) + ")";
}

namespace {

template <class... Parameters>
CUresult call(void* function, CUresult (*)(Parameters...), Parameters... arguments) {
    if (function == nullptr) return CUDA_ERROR_SHARED_OBJECT_SYMBOL_NOT_FOUND;
    return reinterpret_cast<CUresult (*)(Parameters...)>(function)(arguments...);
}

}  // namespace

}  // namespace kccl::nccl

// cuda.h defines most names as those of their newest versions.
#define KCCL_TEXT(name) #name
#define KCCL_DRIVER(name, parameters, ...)                                              \
    extern "C" __attribute__((visibility("hidden"))) CUresult CUDAAPI name parameters { \
        static void* const found = kccl::nccl::driver_function(KCCL_TEXT(name));        \
        return kccl::nccl::call(found, &name __VA_OPT__(, ) __VA_ARGS__);               \
    }
#include "driver.inc"
