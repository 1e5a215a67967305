// Asynchronous copies into block-shared memory and the barriers that they complete on.
#pragma once

#include <stdint.h>

#include <map>
#include <vector>

#include "clock.h"

namespace kccl::sim {

// The state of a mem::CopyBarrier. A phase ends when all arrivals and all bytes are in.
struct CopyPhase {
    // The barrier's number in its block. Each barrier is an agent of its own, because a thread that
    // waits for one barrier knows nothing of copies that complete on others.
    uint32_t index = 0;
    uint32_t arrivals = 0;  // arrivals of each phase
    uint32_t missing = 0;
    int64_t missing_bytes = 0;
    uint32_t phase = 0;
    // The knowledge that arrivals and copies hand on: in this phase so far, and when the last phase
    // ended.
    ClockRef ordered;
    ClockRef caused;
    ClockRef fenced;
    JoinedOften ended_ordered;
    JoinedOften ended_caused;
    JoinedOften ended_fenced;
};

// A piece of a copy. Pieces complete in any order.
struct Piece {
    uint64_t to = 0;
    uint64_t from = 0;
    uint32_t num_bytes = 0;
    uint64_t barrier = 0;
    uint64_t number = 0;  // counts copies in the order of their starts
    ClockRef ordered;     // what the thread that started it knew
    ClockRef fenced;      // the ordinary stores that this thread had fenced
    Event issuer;
    uint32_t call = 0;
    uint64_t launch = 0;
    uint64_t site = 0;
};

struct Copies {
    std::map<uint64_t, CopyPhase> barriers;  // keyed by address
    std::vector<Piece> pieces;
    std::vector<uint64_t> ended;  // numbers of the last pieces that completed
    uint64_t next_number = 0;
    uint32_t next_counter = 1;  // number of the next event of the agent that copies
    bool is_listed = false;
};

}  // namespace kccl::sim
