// The types and constants of CUDA's driver API that gpu.cpp needs, so that it compiles without
// cuda.h. Handles are uint64_t. Python looks up the addresses of the functions.
// tests/csrc/test_cuda_driver.py compares this file with cuda.h.
#pragma once

#include <stddef.h>
#include <stdint.h>

namespace kccl::driver {

constexpr int kNotCaptured = 0;          // CU_STREAM_CAPTURE_STATUS_NONE
constexpr int kCaptured = 1;             // CU_STREAM_CAPTURE_STATUS_ACTIVE
constexpr int kKernelNode = 0;           // CU_GRAPH_NODE_TYPE_KERNEL
constexpr int kStreamSerialization = 6;  // CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION

// CUDA_KERNEL_NODE_PARAMS_v2
struct KernelNode {
    uint64_t function;
    unsigned grid[3], block[3], shared_bytes;
    void **parameters, **extra;
    uint64_t kernel, context;
};

// CUlaunchAttribute
struct LaunchAttribute {
    alignas(8) int id;
    char padding[4];
    int value;
    char rest[60];
};

// CUlaunchConfig
struct LaunchConfig {
    unsigned grid[3], block[3], shared_bytes;
    uint64_t stream;
    LaunchAttribute* attributes;
    unsigned num_attributes;
};

using PushContext = int (*)(uint64_t context);
using CurrentDevice = int (*)(int* device);
using PopContext = int (*)(uint64_t* context);
using Launch = int (*)(uint64_t function, unsigned, unsigned, unsigned, unsigned, unsigned,
                       unsigned, unsigned shared_bytes, uint64_t stream, void** arguments,
                       void** extra);
using LaunchEx = int (*)(const LaunchConfig*, uint64_t function, void** arguments, void** extra);
using LaunchGraph = int (*)(uint64_t graph, uint64_t stream);
using IsCapturing = int (*)(uint64_t stream, int* status);
using CopyToHost = int (*)(void* to, uint64_t from, size_t num_bytes, uint64_t stream);
using CopyToDevice = int (*)(uint64_t to, const void* from, size_t num_bytes, uint64_t stream);
using RecordEvent = int (*)(uint64_t event, uint64_t stream);
using QueryEvent = int (*)(uint64_t event);
// Functions that CUDA has from 12.3 on.
using CaptureInfo = int (*)(uint64_t stream, int* status, uint64_t* id, uint64_t* graph,
                            const uint64_t** nodes, const void** edges, size_t* count);
using NodeType = int (*)(uint64_t node, int* type);
using GetParams = int (*)(uint64_t node, KernelNode*);
using SetParams = int (*)(uint64_t node, const KernelNode*);
using FunctionName = int (*)(const char** name, uint64_t function);

}  // namespace kccl::driver
