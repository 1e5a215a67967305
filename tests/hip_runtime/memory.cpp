// Device memory is a file in memory (memfd), so that other processes can map it.
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <map>

#include "runtime.h"

namespace hip_runtime {
namespace {

constexpr int kHipMemoryTypeUnregistered = 0;
constexpr int kHipMemoryTypeHost = 1;
constexpr int kHipMemoryTypeDevice = 2;
constexpr int kHipMemAllocationTypePinned = 1;
constexpr int kHipMemAllocationTypeUncached = 0x40000000;
constexpr int kHipMemHandleTypePosixFileDescriptor = 1;
constexpr int kHipMemLocationTypeDevice = 1;
constexpr uint64_t kUnit = 2 << 20;
// So a test can see what happens when memory runs out.
constexpr uint64_t kMostBytes = uint64_t{1} << 37;
constexpr uint32_t kMagic = 0x4d454d48;

// A range of addresses that is not reserved only.
struct Range {
    uint64_t num_bytes = 0;
    int type = kHipMemoryTypeDevice;
    int device = 0;
    int fd = -1;
    bool is_opened = false;  // by hipIpcOpenMemHandle
};

// What hipMemCreate makes.
struct Physical {
    int fd;
    uint64_t num_bytes;
    int device;
};

// hipIpcMemHandle_t
struct Handle {
    uint32_t magic;
    int32_t pid;
    int32_t fd;
    int32_t device;
    uint64_t num_bytes;
    char rest[40];
};
static_assert(sizeof(Handle) == 64);

struct Location {
    int type, id;
};

struct Property {
    int type;
    int requested_handle_types;
    Location location;
    void* win32;
    uint32_t flags;
};

struct Access {
    Location location;
    int flags;
};

struct PointerAttribute {
    int type, device;
    void *device_pointer, *host_pointer;
    int is_managed;
    unsigned flags;
};

std::mutex& mutex() {
    static auto& it = *new std::mutex;
    return it;
}

std::map<uint64_t, Range>& ranges() {
    static auto& all = *new std::map<uint64_t, Range>;
    return all;
}

void add(uint64_t address, const Range& range) {
    {
        const std::lock_guard<std::mutex> lock(mutex());
        ranges()[address] = range;
    }
    if (range.type == kHipMemoryTypeDevice) machine_knows(address, range.num_bytes);
}

// False: no range begins there.
bool take(uint64_t address, Range* range) {
    {
        const std::lock_guard<std::mutex> lock(mutex());
        const auto found = ranges().find(address);
        if (found == ranges().end()) return false;
        *range = found->second;
        ranges().erase(found);
    }
    if (range->type == kHipMemoryTypeDevice) machine_forgets(address);
    return true;
}

bool find(uint64_t address, uint64_t* begin, Range* range) {
    const std::lock_guard<std::mutex> lock(mutex());
    auto after = ranges().upper_bound(address);
    if (after == ranges().begin()) return false;
    --after;
    if (address >= after->first + after->second.num_bytes) return false;
    *begin = after->first;
    *range = after->second;
    return true;
}

int make_file(uint64_t num_bytes) {
    const int fd = memfd_create("hip memory", MFD_CLOEXEC);
    if (fd >= 0 && ftruncate(fd, static_cast<off_t>(num_bytes)) != 0) {
        close(fd);
        return -1;
    }
    return fd;
}

// 0: it cannot be mapped.
uint64_t map_file(int fd, uint64_t num_bytes) {
    void* at = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return at == MAP_FAILED ? 0 : reinterpret_cast<uint64_t>(at);
}

int free_range(uint64_t address, bool is_opened) {
    Range range;
    uint64_t begin = 0;
    if (!find(address, &begin, &range) || begin != address || range.is_opened != is_opened ||
        range.fd < 0) {
        return kHipErrorInvalidValue;
    }
    take(address, &range);
    munmap(reinterpret_cast<void*>(address), range.num_bytes);
    close(range.fd);
    return kHipSuccess;
}

}  // namespace
}  // namespace hip_runtime

using namespace hip_runtime;

// ---- Plain memory -------------------------------------------------------------------------------

HIP_API int hipExtMallocWithFlags(void** address, size_t num_bytes, unsigned) {
    HIP_MAY_FAIL();
    if (is_forbidden_by_capture()) return kHipErrorStreamCaptureUnsupported;
    if (num_bytes == 0 || num_bytes > kMostBytes) return kHipErrorOutOfMemory;
    const int fd = make_file(num_bytes);
    const uint64_t at = fd < 0 ? 0 : map_file(fd, num_bytes);
    if (at == 0) return kHipErrorOutOfMemory;
    add(at, {num_bytes, kHipMemoryTypeDevice, current_device(), fd, false});
    *address = reinterpret_cast<void*>(at);
    return kHipSuccess;
}

HIP_API int hipMalloc(void** address, size_t num_bytes) {
    HIP_MAY_FAIL();
    return hipExtMallocWithFlags(address, num_bytes, 0);
}

HIP_API int hipFree(void* address) {
    HIP_MAY_FAIL();
    if (is_forbidden_by_capture()) return kHipErrorStreamCaptureUnsupported;
    if (address == nullptr) return kHipSuccess;
    wait_for_device(current_device());
    return free_range(reinterpret_cast<uint64_t>(address), false);
}

HIP_API int hipHostMalloc(void** address, size_t num_bytes, unsigned) {
    HIP_MAY_FAIL();
    if (is_forbidden_by_capture()) return kHipErrorStreamCaptureUnsupported;
    const int fd = make_file(num_bytes);
    const uint64_t at = fd < 0 ? 0 : map_file(fd, num_bytes);
    if (at == 0) return kHipErrorOutOfMemory;
    add(at, {num_bytes, kHipMemoryTypeHost, current_device(), fd, false});
    *address = reinterpret_cast<void*>(at);
    return kHipSuccess;
}

HIP_API int hipHostFree(void* address) {
    HIP_MAY_FAIL();
    return free_range(reinterpret_cast<uint64_t>(address), false);
}

HIP_API int hipPointerGetAttributes(PointerAttribute* attributes, const void* address) {
    HIP_MAY_FAIL();
    memset(attributes, 0, sizeof(*attributes));
    uint64_t begin = 0;
    Range range;
    attributes->type = kHipMemoryTypeUnregistered;
    attributes->device = -1;
    if (find(reinterpret_cast<uint64_t>(address), &begin, &range)) {
        attributes->type = range.type;
        attributes->device = range.device;
        attributes->device_pointer = const_cast<void*>(address);
    }
    return kHipSuccess;
}

// ---- Handles for other processes ----------------------------------------------------------------

HIP_API int hipIpcGetMemHandle(Handle* handle, void* address) {
    HIP_MAY_FAIL();
    uint64_t begin = 0;
    Range range;
    if (!find(reinterpret_cast<uint64_t>(address), &begin, &range) || range.fd < 0 ||
        begin != reinterpret_cast<uint64_t>(address)) {
        return kHipErrorInvalidValue;
    }
    *handle = {kMagic, getpid(), range.fd, range.device, range.num_bytes, {}};
    return kHipSuccess;
}

HIP_API int hipIpcOpenMemHandle(void** address, Handle handle, unsigned) {
    HIP_MAY_FAIL();
    if (handle.magic != kMagic) return kHipErrorInvalidValue;
    // As on a GPU, a process cannot open its own.
    if (handle.pid == getpid()) return kHipErrorInvalidContext;
    const std::string path =
        "/proc/" + std::to_string(handle.pid) + "/fd/" + std::to_string(handle.fd);
    const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
    const uint64_t at = fd < 0 ? 0 : map_file(fd, handle.num_bytes);
    if (at == 0) return kHipErrorInvalidHandle;
    add(at, {handle.num_bytes, kHipMemoryTypeDevice, handle.device, fd, true});
    *address = reinterpret_cast<void*>(at);
    return kHipSuccess;
}

HIP_API int hipIpcCloseMemHandle(void* address) {
    HIP_MAY_FAIL();
    return free_range(reinterpret_cast<uint64_t>(address), true);
}

// ---- Memory with a mapping of its own -----------------------------------------------------------

HIP_API int hipMemGetAllocationGranularity(size_t* unit, const Property*, int) {
    HIP_MAY_FAIL();
    *unit = kUnit;
    return kHipSuccess;
}

HIP_API int hipMemCreate(Physical** handle, size_t num_bytes, const Property* property,
                         unsigned long long) {
    HIP_MAY_FAIL();
    const bool is_known = property->type == kHipMemAllocationTypePinned ||
                          property->type == kHipMemAllocationTypeUncached;
    if (!is_known || property->location.type != kHipMemLocationTypeDevice ||
        num_bytes % kUnit != 0) {
        return kHipErrorInvalidValue;
    }
    if (num_bytes > kMostBytes) return kHipErrorOutOfMemory;
    const int fd = make_file(num_bytes);
    if (fd < 0) return kHipErrorOutOfMemory;
    *handle = new Physical{fd, num_bytes, property->location.id};
    return kHipSuccess;
}

HIP_API int hipMemRelease(Physical* handle) {
    HIP_MAY_FAIL();
    close(handle->fd);
    delete handle;
    return kHipSuccess;
}

HIP_API int hipMemExportToShareableHandle(int* fd, Physical* handle, int type, unsigned long long) {
    HIP_MAY_FAIL();
    if (type != kHipMemHandleTypePosixFileDescriptor) return kHipErrorNotSupported;
    *fd = fcntl(handle->fd, F_DUPFD_CLOEXEC, 0);
    return *fd < 0 ? kHipErrorInvalidHandle : kHipSuccess;
}

// The descriptor is the pointer's value, as in AMD's driver since ROCm 7.1.
HIP_API int hipMemImportFromShareableHandle(Physical** handle, void* fd, int type) {
    HIP_MAY_FAIL();
    if (type != kHipMemHandleTypePosixFileDescriptor) return kHipErrorNotSupported;
    const int own = fcntl(static_cast<int>(reinterpret_cast<intptr_t>(fd)), F_DUPFD_CLOEXEC, 0);
    struct stat facts;
    if (own < 0 || fstat(own, &facts) != 0) return kHipErrorInvalidValue;
    *handle = new Physical{own, static_cast<uint64_t>(facts.st_size), -1};
    return kHipSuccess;
}

HIP_API int hipMemAddressReserve(void** address, size_t num_bytes, size_t, void*,
                                 unsigned long long) {
    HIP_MAY_FAIL();
    void* at =
        mmap(nullptr, num_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED) return kHipErrorOutOfMemory;
    *address = at;
    return kHipSuccess;
}

HIP_API int hipMemAddressFree(void* address, size_t num_bytes) {
    HIP_MAY_FAIL();
    return munmap(address, num_bytes) == 0 ? kHipSuccess : kHipErrorInvalidValue;
}

// No device may access it before hipMemSetAccess.
HIP_API int hipMemMap(void* address, size_t num_bytes, size_t offset, Physical* handle,
                      unsigned long long) {
    HIP_MAY_FAIL();
    if (offset != 0 || num_bytes > handle->num_bytes) return kHipErrorInvalidValue;
    void* at = mmap(address, num_bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, handle->fd, 0);
    if (at == MAP_FAILED) return kHipErrorInvalidValue;
    add(reinterpret_cast<uint64_t>(address),
        {num_bytes, kHipMemoryTypeDevice, handle->device, -1, false});
    return kHipSuccess;
}

HIP_API int hipMemUnmap(void* address, size_t num_bytes) {
    HIP_MAY_FAIL();
    Range range;
    if (!take(reinterpret_cast<uint64_t>(address), &range)) return kHipErrorInvalidValue;
    void* at = mmap(address, num_bytes, PROT_NONE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
    return at == MAP_FAILED ? kHipErrorInvalidValue : kHipSuccess;
}

HIP_API int hipMemSetAccess(void* address, size_t num_bytes, const Access* access, size_t count) {
    HIP_MAY_FAIL();
    for (size_t i = 0; i < count; ++i) {
        if (access[i].location.type != kHipMemLocationTypeDevice || access[i].flags != 3) {
            return kHipErrorInvalidValue;
        }
    }
    const bool is_done = mprotect(address, num_bytes, PROT_READ | PROT_WRITE) == 0;
    return is_done ? kHipSuccess : kHipErrorInvalidValue;
}
