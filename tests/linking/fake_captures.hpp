// What the launches and the captures of the fake CUDA driver share (fake_launches.cpp,
// fake_captures.cpp).
#pragma once

#include <cuda.h>
#include <kccl/abi.h>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace fake {

struct Function;

enum class Kind { kLaunch, kCopy, kWait, kRecord };

struct Node {
    Kind kind = Kind::kLaunch;
    const Function* function = nullptr;
    unsigned blocks = 0;
    KcclCall call = {};
    void* parameters[1] = {};
    CUdeviceptr to = 0, from = 0;
    size_t size = 0;
    std::vector<uint64_t> before;
};

// Does what a node says, or puts it into the graph that the stream is being captured into.
CUresult enqueue(const Node& node, CUstream stream);

void run(const Node& node);

// Adds one to what fake_cuda_count() tells.
void count(const char* what);

}  // namespace fake
