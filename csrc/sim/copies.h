// The state of a block's asynchronous copies into shared memory, and of the barriers on which they
// complete (copies.cpp).
#pragma once

#include <stdint.h>

#include <map>
#include <vector>

#include "clock.h"

namespace kccl::sim {

// The state of a mem::CopyBarrier, which is an mbarrier on NVIDIA's GPUs. A phase ends when all of
// its arrivals and all bytes that they announced have come.
struct CopyPhase {
    // The barrier's number in its block. In vector clocks the copies of each barrier are an agent
    // of their own, because a thread that waits for one barrier knows nothing of copies that
    // complete on others.
    uint32_t index = 0;
    uint32_t arrivals = 0;      // arrivals that each phase needs
    uint32_t missing = 0;       // arrivals that have not come in this phase
    int64_t missing_bytes = 0;  // bytes announced, minus bytes copied; may be negative for a while
    uint32_t phase = 0;         // how many phases have ended
    // What the threads that arrived, and the copies, hand on to threads that wait (as in Knowledge;
    // fenced: as in Fiber). First three: in this phase so far. Last three: in the phase that has
    // ended last.
    ClockRef ordered;
    ClockRef caused;
    ClockRef fenced;
    JoinedOften ended_ordered;
    JoinedOften ended_caused;
    JoinedOften ended_fenced;
};

// A piece of a copy that has been started and not made. Pieces are made in any order.
struct Piece {
    uint64_t to = 0;
    uint64_t from = 0;
    uint32_t num_bytes = 0;
    uint64_t barrier = 0;
    uint64_t number = 0;  // number of the copy in its block, in the order in which they started
    ClockRef ordered;     // what the thread that started the copy knew by then (Knowledge)
    ClockRef fenced;      // the ordinary stores that this thread had fenced by fence_copies()
    Event issuer;         // the event of that thread that started the copy
    uint32_t call = 0;    // the call in which the thread started it, as an index in Calls
    uint64_t launch = 0;  // number of that thread's launch
    uint64_t site = 0;    // where in the kernel's code
};

// The asynchronous copies of one block.
struct Copies {
    std::map<uint64_t, CopyPhase> barriers;  // keyed by address
    std::vector<Piece> pieces;
    std::vector<uint64_t> ended;  // numbers of the copies of the last eight pieces that were made
    uint64_t next_number = 0;     // number of the next copy
    uint32_t next_counter = 1;    // number of the next event of the agents that copy
    bool is_listed = false;       // the block is in Machine::copying_
};

}  // namespace kccl::sim
