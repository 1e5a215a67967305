// What the machine remembers of calls that all threads of a coop must make together. Each thread
// numbers its calls with each kind of coop. The first thread that makes call k of a coop determines
// what the coop's other threads must call as their call k.
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <array>
#include <deque>
#include <vector>

#include "../include/kccl/targets/sim_device.h"
#include "types.h"

namespace kccl::sim {

struct Fiber;

// The kinds of coops. The numbers are those of KcclSimCoop and of kccl::CoopKind.
enum class Coop : uint8_t {
    kThread = kKcclSimCoopThread,
    kWarp = kKcclSimCoopWarp,
    kBlock = kKcclSimCoopBlock,
    kGrid = kKcclSimCoopGrid
};
constexpr size_t kNumCoops = 4;

// What a call does in an exchange between blocks. The numbers are those of kccl::ExchangeStep in
// together.cuh.
enum class ExchangeStep : uint32_t { kNone, kOpen, kPublish, kCollect, kClose };

// A call, as the first thread of the coop made it.
struct MadeCall {
    const char* name = nullptr;
    uint64_t state = 0;                      // address: the communicator
    std::vector<KcclSimArgument> arguments;  // the arguments that must be the same in all threads
    Deed by;                                 // the coop's first thread in this call, and where it
                                             // made the call
    uint32_t num_threads = 0;                // how many threads of the coop have made the call
};

// The call that a thread has begun last.
struct BegunCall {
    static constexpr uint32_t kMostArguments = 5;
    const char* name = nullptr;  // null before the thread's first call
    Coop coop = Coop::kThread;
    uint64_t state = 0;    // address: the communicator
    uint64_t site = 0;     // where in the code
    uint32_t counter = 0;  // number of the thread's last event before the call
    uint32_t num_arguments = 0;
    std::array<KcclSimArgument, kMostArguments> arguments;
};

// The calls of one coop that some of its threads have made, and others not yet.
struct CallLog {
    uint32_t first = 0;  // number of calls[0]
    uint32_t end = 0;    // number of the call after the last
    std::deque<MadeCall> calls;

    MadeCall& at(uint32_t number) { return calls[number - first]; }
    const MadeCall& at(uint32_t number) const { return calls[number - first]; }
};

// An exchange between blocks (grid_exchange.cuh) that a block has open.
struct Exchange {
    uint64_t state;             // address: the communicator
    uint32_t reach;             // KcclReach
    bool is_published = false;  // the block has published a slice, and not collected since
    uint64_t num_bytes = 0;     // of that slice
    Deed by = {};               // where the block has published it
};
// What the blocks of a rank have collected in one epoch of an exchange so far.
struct Collected {
    uint32_t num_blocks = 0;   // how many blocks have collected
    std::vector<bool> slices;  // by slice: a block other than its publisher has collected it
};
// The slice that a block has published last.
struct OwnSlice {
    uint32_t index = 0;  // the slice's number in the exchange
    uint32_t count = 0;  // how many slices the exchange has
    uint32_t epoch = 0;  // the exchange's epoch
};
using Exchanges = std::vector<Exchange>;

// Tells whether two names of calls are equal. It compares the text, because each kernel's library
// has its own copies of the names.
inline bool is_same(const char* one, const char* other) {
    return one == other || strcmp(one, other) == 0;
}

// A call that some threads of a coop have made, and that one of the coop's threads will not make.
struct Lack {
    const Fiber* fiber;  // the thread that will not make the call
    Coop coop;
    uint32_t number;  // number of the call
};

}  // namespace kccl::sim
