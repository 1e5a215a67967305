// Which kernel makes a call, and in which shape: the planner's tables (kccl/plan) as constants,
// which the build writes into plan.inc.
#pragma once

#include <cstddef>
#include <cstdint>

#include "api.h"

namespace kccl::nccl {

enum class Collective { kAllReduce, kReduceScatter, kAllGather, kBroadcast };

// The facts about a kernel: its KernelSpec.
struct Kernel {
    const char* name;
    uint32_t number;            // KcclKernel
    uint32_t bytes_per_thread;  // payload bytes that a thread moves at a time
};

// A line of a tuning table, for one collective, number of ranks and element type.
struct Line {
    Collective collective;
    int world_size;
    uint32_t dtype;        // KcclDtype; of calls that only move data: kKcclUint8
    uint64_t up_to_bytes;  // the largest message, as nccl-tests counts it
    uint32_t kernel;       // index of a Kernel
    uint32_t blocks;       // the most blocks; 0 for as many as a channel has
    uint32_t threads;      // the threads of a block until all blocks are used; 0 for the default
};

// A call of NCCL's, as far as all ranks make it with the same arguments: NCCL requires that, and
// nothing else may decide who makes the call.
struct Request {
    Collective collective;
    size_t count;  // elements: of a rank's input; reduce_scatter: of a rank's result
    ncclDataType_t type;
    ncclRedOp_t op;  // ncclSum where nothing is reduced
    int world_size;
};

// A call that KCCL makes.
struct Choice {
    const Kernel* kernel;      // null: NCCL makes it
    const char* why_not;       // why NCCL makes it
    uint32_t dtype;            // KcclDtype
    uint64_t count;            // KcclCall.count
    uint64_t num_bytes;        // of the message
    uint64_t peer_bytes;       // that a rank sends to a peer: the threads of the rank divide them
    uint32_t blocks, threads;  // as in Line
    bool has_root;  // only the root has an input, and the kernel does not write its result
};

// Chooses who makes a call.
Choice choose(const Request& request);

// Returns the bytes of an element; 0 if NCCL has no such type.
size_t bytes_of(ncclDataType_t type);

// Returns NCCL's name of a type without its prefix, in lower case.
const char* name_of(ncclDataType_t type);

struct Shape {
    uint32_t blocks, threads;
    uint32_t share;  // KcclCall.share
};

// Returns the launch shape of a call, as kccl/backends/shapes.py and KernelSpec.share() do.
// most_threads: those that a block of the kernel may have. most_blocks: those that a call may have.
// Both are the same on all ranks.
Shape shape_of(const Choice& choice, uint32_t most_threads, uint32_t most_blocks);

// Returns the most threads of a block, of any kernel.
uint32_t most_threads();
// Returns the threads of a warp, of which a block has whole ones.
uint32_t warp_size();

// Returns a hash of the tables.
uint32_t tables_hash();

// Tells whether there are kernels for a number of ranks.
bool has_world_size(int world_size);

}  // namespace kccl::nccl
