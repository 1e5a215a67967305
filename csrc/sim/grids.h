// All ranks of a job: their streams of launches, blocks, warps and threads.
#pragma once

#include <stdint.h>

#include <array>
#include <deque>
#include <map>
#include <memory>
#include <tuple>
#include <vector>

#include "../include/kccl/targets/sim_device.h"
#include "coops.h"
#include "copies.h"
#include "edges.h"
#include "fiber.h"
#include "memory.h"
#include "types.h"
#include "watchdog.h"

namespace kccl::sim {

struct Block;
struct Grid;
struct Warp;

struct Fiber {
    enum State : uint8_t { kIdle, kReady, kAtBlock, kAtWarp, kAtKernels, kPolling, kEnded };

    KcclSimThread self = {};
    Context context;
    State state = kIdle;
    bool has_context = false;
    uint32_t index = 0;
    uint32_t level = 0;
    Block* block = nullptr;
    Warp* warp = nullptr;
    uint32_t lane = 0;
    Knowledge knowledge;
    std::vector<Look> polled;   // loads since the last pause or store
    size_t num_settled = 0;     // how many of these are settled
    bool saw_old = false;       // one of these returned an old value
    bool has_turn = false;      // by tape: this thread makes the next access
    uint32_t woken_before = 0;  // Warp::woken when it began to poll
    ClockRef fenced;            // what its fence_copies() covers, and those that come before
    uint64_t exchanged = 0;     // what it gives to a warp's or block's meeting, and gets
    uint32_t source_lane = 0;
    uint64_t site = 0;  // code address of what it does or waits in
    uint64_t address = 0;
    uint64_t looked_ns = 0;  // when it last looked at the clock
    uint64_t owner = 0;      // the owner in Edges that stands for its block
    // How many calls it has made with each kind of coop.
    std::array<uint32_t, kNumCoops> num_calls = {};
    BegunCall begun;
};

// The call that the thread has begun, for reports.
inline Deed deed_of(const Fiber& fiber, uint64_t step) {
    return {fiber.knowledge.now(), fiber.knowledge.call, fiber.site, step, kKcclSimEnterCall, true};
}

enum class Meeting : uint8_t { kNone, kSync, kAny, kBallot, kShuffle };

struct Warp {
    uint32_t index = 0;
    std::vector<Fiber*> lanes;
    uint32_t arrived = 0;
    uint32_t ended = 0;
    uint32_t level = 0;
    uint32_t woken = 0;  // how often a store woke it
    Meeting meeting = Meeting::kNone;
    CallLog calls;
    // The most calls of the block that a thread of the warp has made.
    uint32_t num_calls_of_block = 0;

    uint32_t num_alive() const { return static_cast<uint32_t>(lanes.size()) - ended; }
};

struct SharedVariable {
    const void* declaration;  // null: dynamic shared memory
    Region region;
    std::unique_ptr<uint8_t[]> memory;
};

struct Block {
    Grid* grid = nullptr;
    uint32_t slot = 0;
    uint32_t index = 0;
    std::vector<Fiber*> fibers;
    uint32_t alive = 0;
    uint32_t arrived = 0;
    bool is_fenced = true;
    bool lets_in = false;  // it has admitted dependents, or ended
    Meeting meeting = Meeting::kNone;
    std::vector<SharedVariable> shared;
    Copies copies;
    CallLog calls;
    Exchanges exchanges;
    OwnSlice own_slice;
    bool is_incomplete = false;  // one of its threads lacks a call that others are in
};

// What is known of the launches that have ended; as in Knowledge.
struct Known {
    ClockRef ordered;
    ClockRef packets;
    ClockRef caused;
};

struct Grid {
    int32_t rank = 0;
    uint64_t number = 0;  // a dependent has that of the launch before it
    uint32_t lane = 0;
    // The launch before it, if this one is a dependent.
    std::shared_ptr<Grid> before;
    Known at_begin;
    Known at_end;
    void (*entry)(const void*) = nullptr;
    std::vector<uint64_t> arguments;  // as 8-byte words, for alignment
    KcclSimLaunch launch = {};
    std::vector<std::unique_ptr<Block>> blocks;
    std::vector<std::unique_ptr<Warp>> warps;
    uint32_t alive = 0;       // threads that have not ended
    uint32_t num_closed = 0;  // blocks that let no dependent in yet
    bool has_begun = false;
    bool has_ended = false;
    uint64_t owner = 0;          // the owner in Edges that stands for this grid
    std::vector<Region> arrays;  // arrays among the arguments, and the arguments themselves
    // Memory that the machine does not know: pointers to it, which the program has stored, and the
    // parts that the program has accessed, which may have pointers to more.
    std::vector<uint64_t> foreign_pointers;
    std::map<uint64_t, Region> foreign_parts;
    CodeRange code;  // code of the kernel's library
    CallLog calls;
    // Keyed by communicator, reach and epoch of the exchange.
    std::map<std::tuple<uint64_t, uint32_t, uint32_t>, Collected> collected;
    // A communicator that it uses has failed: its threads may go different ways.
    bool has_failed = false;

    uint32_t num_ended = 0;  // blocks that have ended

    bool lets_in() const { return has_begun && num_closed == 0; }
    // Tells whether another block may begin.
    bool has_room() const {
        const uint64_t running = blocks.size() - num_ended;
        return blocks.size() < launch.num_blocks &&
               (launch.most_resident == 0 || running < launch.most_resident);
    }
};

struct Stream {
    std::deque<std::shared_ptr<Grid>> launches;  // launches that have not ended
    Known known;                                 // what all launches that have ended knew
};

struct Rank {
    enum HostState : uint8_t { kRunning, kInLaunch, kOutside, kLeft };

    // A rank with a host thread uses only the first.
    std::deque<Stream> streams = std::deque<Stream>(1);
    uint32_t num_blocks = 0;  // blocks of launches that run
    HostState host = kRunning;
    uint64_t running_since_ns = 0;
};

}  // namespace kccl::sim
