// A fake CUDA driver in host memory, with the functions that host.hpp uses. A handle is a memfd. So
// ranks without a GPU share windows, and kernels compiled for the CPU can use them.
//
// FAKE_CUDA_FAILS=<function>[:<rank>] makes a function fail; the rank is PMI_RANK's.
#include <cuda.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

namespace {

constexpr size_t kUnit = 65536;
int live = 0;  // handles, reservations, mappings, allocations

bool fails(const char* function) {
    const char* told = std::getenv("FAKE_CUDA_FAILS");
    if (told == nullptr) return false;
    const char* rank = std::getenv("PMI_RANK");
    std::string name = function;
    // cuda.h defines the names of some functions as those of their second versions.
    if (name.ends_with("_v2")) name.resize(name.size() - 3);
    return told == name || told == name + ":" + (rank != nullptr ? rank : "0");
}

void* pointer(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

struct AtExit {
    ~AtExit() {
        if (live != 0) std::fprintf(stderr, "fake_cuda: %d things of the driver leaked\n", live);
    }
} at_exit;

}  // namespace

#define FAKE_CUDA_MAY_FAIL \
    if (fails(__func__)) return CUDA_ERROR_OUT_OF_MEMORY

extern "C" {

CUresult cuInit(unsigned int) {
    FAKE_CUDA_MAY_FAIL;
    return CUDA_SUCCESS;
}
CUresult cuGetErrorName(CUresult code, const char** name) {
    *name = code == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED ? "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"
                                                          : "CUDA_ERROR_OUT_OF_MEMORY";
    return CUDA_SUCCESS;
}
CUresult cuCtxGetCurrent(CUcontext* context) {
    *context = fails(__func__) ? nullptr : reinterpret_cast<CUcontext>(&live);
    return CUDA_SUCCESS;
}
CUresult cuCtxGetDevice(CUdevice* device) {
    *device = 0;
    return CUDA_SUCCESS;
}
CUresult cuCtxPushCurrent(CUcontext) { return CUDA_SUCCESS; }
CUresult cuCtxPopCurrent(CUcontext*) { return CUDA_SUCCESS; }
CUresult cuCtxSynchronize() { return CUDA_SUCCESS; }

CUresult cuMemGetAllocationGranularity(size_t* unit, const CUmemAllocationProp*,
                                       CUmemAllocationGranularity_flags) {
    *unit = kUnit;
    return CUDA_SUCCESS;
}
CUresult cuMemCreate(CUmemGenericAllocationHandle* handle, size_t size, const CUmemAllocationProp*,
                     unsigned long long) {
    FAKE_CUDA_MAY_FAIL;
    if (size % kUnit != 0) return CUDA_ERROR_INVALID_VALUE;
    const int fd = memfd_create("fake_cuda", MFD_CLOEXEC);
    if (fd < 0 || ftruncate(fd, static_cast<off_t>(size)) != 0) return CUDA_ERROR_OUT_OF_MEMORY;
    *handle = static_cast<CUmemGenericAllocationHandle>(fd);
    ++live;
    return CUDA_SUCCESS;
}
CUresult cuMemExportToShareableHandle(void* exported, CUmemGenericAllocationHandle handle,
                                      CUmemAllocationHandleType, unsigned long long) {
    FAKE_CUDA_MAY_FAIL;
    *static_cast<int*>(exported) = dup(static_cast<int>(handle));
    return CUDA_SUCCESS;
}
CUresult cuMemImportFromShareableHandle(CUmemGenericAllocationHandle* handle, void* exported,
                                        CUmemAllocationHandleType) {
    FAKE_CUDA_MAY_FAIL;
    const int fd = dup(static_cast<int>(reinterpret_cast<intptr_t>(exported)));
    if (fd < 0) return CUDA_ERROR_INVALID_VALUE;
    *handle = static_cast<CUmemGenericAllocationHandle>(fd);
    ++live;
    return CUDA_SUCCESS;
}
CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    --live;
    return close(static_cast<int>(handle)) == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemAddressReserve(CUdeviceptr* address, size_t size, size_t, CUdeviceptr,
                             unsigned long long) {
    FAKE_CUDA_MAY_FAIL;
    void* place = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (place == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
    *address = reinterpret_cast<CUdeviceptr>(place);
    ++live;
    return CUDA_SUCCESS;
}
CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
    --live;
    return munmap(pointer(address), size) == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemMap(CUdeviceptr address, size_t size, size_t, CUmemGenericAllocationHandle handle,
                  unsigned long long) {
    FAKE_CUDA_MAY_FAIL;
    void* place = mmap(pointer(address), size, PROT_NONE, MAP_SHARED | MAP_FIXED,
                       static_cast<int>(handle), 0);
    if (place == MAP_FAILED) return CUDA_ERROR_INVALID_VALUE;
    ++live;
    return CUDA_SUCCESS;
}
CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
    --live;
    void* place =
        mmap(pointer(address), size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    return place != MAP_FAILED ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc* access, size_t) {
    FAKE_CUDA_MAY_FAIL;
    const bool is_whole = access->flags == CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    const int rights = is_whole ? PROT_READ | PROT_WRITE : PROT_NONE;
    return mprotect(pointer(address), size, rights) == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult cuMemAlloc(CUdeviceptr* address, size_t size) {
    FAKE_CUDA_MAY_FAIL;
    // Not zero, because a GPU's memory need not be zero.
    void* place = std::malloc(size);
    std::memset(place, 0x5a, size);
    *address = reinterpret_cast<CUdeviceptr>(place);
    ++live;
    return CUDA_SUCCESS;
}
CUresult cuMemFree(CUdeviceptr address) {
    --live;
    std::free(pointer(address));
    return CUDA_SUCCESS;
}
CUresult cuMemHostAlloc(void** memory, size_t size, unsigned int) {
    FAKE_CUDA_MAY_FAIL;
    *memory = std::malloc(size);
    std::memset(*memory, 0x5a, size);
    ++live;
    return CUDA_SUCCESS;
}
CUresult cuMemHostGetDevicePointer(CUdeviceptr* address, void* memory, unsigned int) {
    *address = reinterpret_cast<CUdeviceptr>(memory);
    return CUDA_SUCCESS;
}
CUresult cuMemFreeHost(void* memory) {
    --live;
    std::free(memory);
    return CUDA_SUCCESS;
}
// What a stream is given is done at once.
CUresult cuStreamCreate(CUstream* stream, unsigned int) {
    *stream = static_cast<CUstream>(std::malloc(1));
    ++live;
    return CUDA_SUCCESS;
}
CUresult cuStreamDestroy(CUstream stream) {
    --live;
    std::free(stream);
    return CUDA_SUCCESS;
}
CUresult cuStreamSynchronize(CUstream) { return CUDA_SUCCESS; }
CUresult cuMemsetD8Async(CUdeviceptr address, unsigned char value, size_t size, CUstream) {
    std::memset(pointer(address), value, size);
    return CUDA_SUCCESS;
}
CUresult cuMemcpyHtoDAsync(CUdeviceptr to, const void* from, size_t size, CUstream) {
    std::memcpy(pointer(to), from, size);
    return CUDA_SUCCESS;
}

}  // extern "C"
