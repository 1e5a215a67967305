// Calls that all threads of a coop make. Each thread counts its own calls. The first thread that
// makes call k of a coop determines what the others must call.
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

// The values of KcclSimCoop and of kccl::CoopKind.
enum class Coop : uint8_t {
    kThread = kKcclSimCoopThread,
    kWarp = kKcclSimCoopWarp,
    kBlock = kKcclSimCoopBlock,
    kGrid = kKcclSimCoopGrid
};
constexpr size_t kNumCoops = 4;

// As in together.cuh.
enum class ExchangeStep : uint32_t { kNone, kOpen, kPublish, kCollect, kClose };

// A call, as the first thread of the coop made it.
struct MadeCall {
    const char* name = nullptr;
    uint64_t state = 0;
    std::vector<KcclSimArgument> arguments;
    Deed by;
    uint32_t num_threads = 0;  // threads that have made it
};

// The call that a thread has begun last.
struct BegunCall {
    static constexpr uint32_t kMostArguments = 5;
    const char* name = nullptr;  // null: none
    Coop coop = Coop::kThread;
    uint64_t state = 0;
    uint64_t site = 0;
    uint32_t counter = 0;  // number of the thread's last event before it
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

// An exchange that a block has open, and the slice that the block has published there and not
// collected yet.
struct Exchange {
    uint64_t state;
    uint32_t reach;
    bool is_published = false;
    uint64_t num_bytes = 0;
    Deed by = {};
};
// What the blocks of a rank have collected of an exchange so far.
struct Collected {
    uint32_t num_blocks = 0;
    std::vector<bool> slices;  // by slice: a block other than its publisher has collected it
};
// A block's own slice in the exchange that it has published to last, and how many there are.
struct OwnSlice {
    uint32_t index = 0;
    uint32_t count = 0;
    uint32_t epoch = 0;
};
using Exchanges = std::vector<Exchange>;

// Tells whether two names are equal. Each kernel's library has its own copies of names.
inline bool is_same(const char* one, const char* other) {
    return one == other || strcmp(one, other) == 0;
}

// A call that some threads of a coop are in, and that one of them will not make.
struct Lack {
    const Fiber* fiber;  // the thread that will not make it
    Coop coop;
    uint32_t number;  // number of the call
};

}  // namespace kccl::sim
