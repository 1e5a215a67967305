// DLPack's C exchange interface, version 1, by which C code gets the memory of a library's arrays
// without a Python frame. An array's type offers the interface as a capsule, in its attribute
// __dlpack_c_exchange_api__.
#pragma once

#include <stdint.h>

namespace kccl::host {

// DLPack's DLDevice. type: DLDeviceType; id: the number among devices of this type.
struct DlpackDevice {
    int32_t type;
    int32_t id;
    bool operator==(const DlpackDevice&) const = default;
};
constexpr int32_t kDlpackCpu = 1;
constexpr uint8_t kDlpackComplex = 5;  // kDLComplex, a value of DlpackTensor::code

// DLPack's DLTensor. The library still owns what the pointers point to.
struct DlpackTensor {
    void* data;
    DlpackDevice device;
    int32_t num_dimensions;
    uint8_t code;
    uint8_t bits;
    uint16_t lanes;
    const int64_t* shape;
    const int64_t* strides;  // in elements; null if C-contiguous
    uint64_t byte_offset;
};

// DLPack's DLPackExchangeAPI, with its members up to the last one that is used here.
struct DlpackExchange {
    uint32_t major, minor;
    const DlpackExchange* older;
    void* allocate;
    void* managed_from_object;
    void* object_from_managed;
    // Fills in the memory, shape and device of an array. Returns nonzero, with an exception set, if
    // it fails. The pointer may be null.
    int (*tensor_from_object)(void* object, DlpackTensor* filled);
    // Stores in *filled the stream that the library now uses on the device. Returns nonzero, with
    // an exception set, if it fails. The pointer may be null.
    int (*current_stream)(int32_t device_type, int32_t device_id, void** filled);
};

inline bool is_contiguous(const DlpackTensor& tensor) {
    int64_t stride = 1;
    for (int32_t i = tensor.num_dimensions - 1; tensor.strides != nullptr && i >= 0; --i) {
        if (tensor.shape[i] != 1 && tensor.strides[i] != stride) return false;
        stride *= tensor.shape[i];
    }
    return true;
}

inline int64_t num_bytes(const DlpackTensor& tensor) {
    int64_t bits = int64_t{tensor.bits} * tensor.lanes;
    for (int32_t i = 0; i < tensor.num_dimensions; ++i) bits *= tensor.shape[i];
    return bits / 8;
}

}  // namespace kccl::host
