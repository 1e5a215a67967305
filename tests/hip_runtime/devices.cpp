// Devices, their attributes, and which functions are told to fail.
#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#include <map>

#include "runtime.h"

namespace hip_runtime {
namespace {

constexpr int kMostDevices = 8;
constexpr int kVersion = 71500000;

// hipDeviceAttribute_t
constexpr int kHipDeviceAttributeMaxThreadsPerBlock = 56;
constexpr int kHipDeviceAttributeMultiprocessorCount = 63;
constexpr int kHipDeviceAttributeMaxSharedMemoryPerBlock = 74;
constexpr int kHipDeviceAttributeWarpSize = 87;
constexpr int kHipDeviceAttributeVirtualMemoryManagementSupported = 89;

// Where hipDeviceProp_tR0600 has its fields; tests/hip/test_runtime.py reads them by hip-python.
constexpr size_t kArchAt = 1160, kPropertyBytes = 1472;

thread_local int current = 0;

struct Failures {
    std::mutex mutex;
    std::map<std::string, int> codes;
};

// At first, what HIP_RUNTIME_FAIL says: "function=code,...".
Failures& failures() {
    static Failures& all = *[] {
        auto* made = new Failures;
        const char* told = getenv("HIP_RUNTIME_FAIL");
        std::string text = told == nullptr ? "" : told;
        while (!text.empty()) {
            const size_t end = text.find(','), equals = text.find('=');
            if (equals != std::string::npos) {
                made->codes[text.substr(0, equals)] = atoi(text.c_str() + equals + 1);
            }
            text = end == std::string::npos ? "" : text.substr(end + 1);
        }
        return made;
    }();
    return all;
}

bool is_device(int ordinal) { return ordinal >= 0 && ordinal < num_devices(); }

}  // namespace

int told_to_fail(const char* name) {
    Failures& all = failures();
    const std::lock_guard<std::mutex> lock(all.mutex);
    const auto found = all.codes.find(name);
    return found == all.codes.end() ? 0 : found->second;
}

int num_devices() {
    static const int count = [] {
        const char* told = getenv("HIP_RUNTIME_DEVICES");
        return told == nullptr ? kMostDevices : atoi(told);
    }();
    return count;
}

int current_device() { return current; }

}  // namespace hip_runtime

using namespace hip_runtime;

// From now on the function returns this code; 0: it works again.
HIP_API void hip_runtime_fail(const char* name, int code) {
    Failures& all = failures();
    const std::lock_guard<std::mutex> lock(all.mutex);
    if (code == 0) {
        all.codes.erase(name);
    } else {
        all.codes[name] = code;
    }
}

HIP_API int hipInit(unsigned) {
    HIP_MAY_FAIL();
    return num_devices() > 0 ? kHipSuccess : kHipErrorNoDevice;
}

HIP_API int hipDriverGetVersion(int* version) {
    HIP_MAY_FAIL();
    const char* const told = getenv("HIP_RUNTIME_VERSION");
    *version = told == nullptr ? kVersion : atoi(told);
    return kHipSuccess;
}

HIP_API int hipRuntimeGetVersion(int* version) {
    HIP_MAY_FAIL();
    *version = kVersion;
    return kHipSuccess;
}

HIP_API int hipGetProcAddress(const char* name, void** address, int, uint64_t, int* status) {
    HIP_MAY_FAIL();
    *address = dlsym(RTLD_DEFAULT, name);
    Dl_info self;
    if (dladdr(reinterpret_cast<void*>(&hipInit), &self) != 0) {
        void* library = dlopen(self.dli_fname, RTLD_NOW | RTLD_NOLOAD);
        if (library != nullptr) *address = dlsym(library, name);
    }
    if (status != nullptr) *status = *address == nullptr ? 1 : 0;
    return *address == nullptr ? kHipErrorNotFound : kHipSuccess;
}

HIP_API int hipGetDeviceCount(int* count) {
    HIP_MAY_FAIL();
    *count = num_devices();
    return *count > 0 ? kHipSuccess : kHipErrorNoDevice;
}

HIP_API int hipGetDevice(int* ordinal) {
    HIP_MAY_FAIL();
    *ordinal = current;
    return kHipSuccess;
}

HIP_API int hipSetDevice(int ordinal) {
    HIP_MAY_FAIL();
    if (!is_device(ordinal)) return kHipErrorInvalidDevice;
    current = ordinal;
    return kHipSuccess;
}

HIP_API int hipDeviceGetName(char* name, int capacity, int ordinal) {
    HIP_MAY_FAIL();
    if (!is_device(ordinal)) return kHipErrorInvalidDevice;
    strncpy(name, "simulated MI300X", static_cast<size_t>(capacity));
    return kHipSuccess;
}

HIP_API int hipDeviceGetUuid(char* uuid, int ordinal) {
    HIP_MAY_FAIL();
    if (!is_device(ordinal)) return kHipErrorInvalidDevice;
    memset(uuid, 0, 16);
    memcpy(uuid, "simulated ", 10);
    uuid[15] = static_cast<char>('0' + ordinal);
    return kHipSuccess;
}

HIP_API int hipDeviceGetAttribute(int* value, int attribute, int ordinal) {
    HIP_MAY_FAIL();
    if (!is_device(ordinal)) return kHipErrorInvalidDevice;
    switch (attribute) {
        case kHipDeviceAttributeMaxThreadsPerBlock: *value = kMostThreads; break;
        case kHipDeviceAttributeMultiprocessorCount: *value = kMultiprocessors; break;
        case kHipDeviceAttributeMaxSharedMemoryPerBlock: *value = kSharedBytes; break;
        case kHipDeviceAttributeWarpSize: *value = kWarpSize; break;
        case kHipDeviceAttributeVirtualMemoryManagementSupported:
            *value = getenv("HIP_RUNTIME_NO_VMM") == nullptr ? 1 : 0;
            break;
        default: return kHipErrorInvalidValue;
    }
    return kHipSuccess;
}

HIP_API int hipGetDevicePropertiesR0600(char* properties, int ordinal) {
    HIP_MAY_FAIL();
    if (!is_device(ordinal)) return kHipErrorInvalidDevice;
    memset(properties, 0, kPropertyBytes);
    strcpy(properties, "simulated MI300X");
    const char* arch = getenv("HIP_RUNTIME_ARCH");
    strncpy(properties + kArchAt, arch != nullptr ? arch : "gfx942:sramecc+:xnack-", 255);
    return kHipSuccess;
}

HIP_API int hipDeviceCanAccessPeer(int* can, int ordinal, int peer) {
    HIP_MAY_FAIL();
    if (!is_device(ordinal) || !is_device(peer)) return kHipErrorInvalidDevice;
    const bool are_apart = getenv("HIP_RUNTIME_APART") != nullptr;
    *can = ordinal != peer && !are_apart ? 1 : 0;
    return kHipSuccess;
}

HIP_API int hipDeviceEnablePeerAccess(int peer, unsigned flags) {
    HIP_MAY_FAIL();
    static std::mutex mutex;
    static bool enabled[kMostDevices][kMostDevices] = {};
    if (!is_device(peer) || peer == current || flags != 0) return kHipErrorInvalidDevice;
    const std::lock_guard<std::mutex> lock(mutex);
    if (enabled[current][peer]) return kHipErrorPeerAccessAlreadyEnabled;
    enabled[current][peer] = true;
    return kHipSuccess;
}
