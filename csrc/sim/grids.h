// What the machine simulates: ranks, their streams of launches, and the blocks, warps and threads
// of the launches.
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

// A simulated thread. When it ends, another thread may use the object and its stack.
struct Fiber {
    // kIdle: no thread. kReady: the thread can run. kAtBlock, kAtWarp: it waits at a barrier or
    // vote of its block or warp. kAtKernels: it waits in await_kernels_before(). kPolling: it polls
    // a word, in vain until something is stored. kEnded: it has returned from its kernel.
    enum State : uint8_t { kIdle, kReady, kAtBlock, kAtWarp, kAtKernels, kPolling, kEnded };

    KcclSimThread self = {};  // what the kernel asks about this thread
    Context context;
    State state = kIdle;
    bool has_context = false;  // whether `context` is valid
    uint32_t index = 0;        // number of this object, and of its stack
    uint32_t level = 0;        // in Ready: ready threads of a higher level run first
    Block* block = nullptr;
    Warp* warp = nullptr;
    uint32_t lane = 0;  // the thread's number in its warp
    Knowledge knowledge;
    std::vector<Look> polled;   // words loaded in the poll under way (polls.cpp)
    size_t num_settled = 0;     // how many of these loads were passed to Memory::settle()
    bool saw_old = false;       // one of these loads returned an old value
    bool has_turn = false;      // kKcclSimExhaustive: this thread makes the next access
    uint32_t woken_before = 0;  // Warp::woken when the poll began
    // The events before a fence_copies() of this thread, or of one with which it has synchronised.
    // An asynchronous copy that this thread starts sees only ordinary stores among these events.
    ClockRef fenced;
    uint64_t exchanged = 0;    // the value that the thread passes to a vote or shuffle, then the
                               // result
    uint32_t source_lane = 0;  // in a shuffle: the lane whose value it gets
    uint64_t site = 0;         // return address in the kernel's code, of what the thread does now
    uint64_t address = 0;      // the address that it accesses now, or 0
    uint64_t looked_ns = 0;    // when it last read the machine's clock
    uint64_t owner = 0;        // the owner in Edges that stands for its block
    // How many calls it has made with each kind of coop.
    std::array<uint32_t, kNumCoops> num_calls = {};
    BegunCall begun;  // the last of these calls
};

// Returns what the thread does now, in a finding about a call of a coop.
inline Deed deed_of(const Fiber& fiber, uint64_t step) {
    return {fiber.knowledge.now(), fiber.knowledge.call, fiber.site, step, kKcclSimEnterCall, true};
}

// What threads of a block or warp do when they wait for each other: a barrier, a vote of a block, a
// ballot of a warp, a shuffle of a warp.
enum class Meeting : uint8_t { kNone, kSync, kAny, kBallot, kShuffle };

struct Warp {
    uint32_t index = 0;  // its number in the machine
    std::vector<Fiber*> lanes;
    uint32_t arrived = 0;              // how many threads wait in `meeting`
    uint32_t ended = 0;                // how many threads have ended
    uint32_t level = 0;                // kKcclSimPriority: the level of its threads
    uint32_t woken = 0;                // how often its polling threads have been woken
    Meeting meeting = Meeting::kNone;  // where threads wait now
    CallLog calls;
    // The most calls of the block (coop kBlock) that a thread of this warp has made.
    uint32_t num_calls_of_block = 0;

    uint32_t num_alive() const { return static_cast<uint32_t>(lanes.size()) - ended; }
};

// A block's instance of a variable in block-shared memory.
struct SharedVariable {
    const void* declaration;  // null for dynamic shared memory
    Region region;
    std::unique_ptr<uint8_t[]> memory;
};

struct Block {
    Grid* grid = nullptr;
    uint32_t slot = 0;   // in vector clocks
    uint32_t index = 0;  // in the grid
    std::vector<Fiber*> fibers;
    uint32_t alive = 0;     // threads that have not ended
    uint32_t arrived = 0;   // threads that wait in `meeting`
    bool is_fenced = true;  // all threads in `meeting` have fences around it (sim_device.h)
    bool lets_in = false;   // the block has called launch_dependents(), or has ended
    Meeting meeting = Meeting::kNone;
    std::vector<SharedVariable> shared;
    Copies copies;
    CallLog calls;
    Exchanges exchanges;
    OwnSlice own_slice;
    bool is_incomplete = false;  // one of its threads does not make a call that others have made
};

// What all threads of some launches that have ended knew: clocks with the meaning that they have in
// Knowledge.
struct Known {
    ClockRef ordered;
    ClockRef packets;
    ClockRef caused;
};

// A launch.
struct Grid {
    int32_t rank = 0;
    uint64_t number = 0;  // of the launch; a dependent has the number of the launch before it
    uint32_t lane = 0;    // as for Slots::of()
    // The launch before this one, if this one is a programmatic dependent and the other had not
    // ended when this one was enqueued. Otherwise null.
    std::shared_ptr<Grid> before;
    Known at_begin;  // what its threads know when they begin
    Known at_end;    // what they knew when they ended; valid if has_ended
    void (*entry)(const void*) = nullptr;
    std::vector<uint64_t> arguments;  // contains the copy of the arguments, aligned to 64 bytes
    KcclSimLaunch launch = {};
    std::vector<std::unique_ptr<Block>> blocks;  // those that have begun
    std::vector<std::unique_ptr<Warp>> warps;
    uint32_t alive = 0;       // threads that have not ended
    uint32_t num_closed = 0;  // blocks that let no dependent in yet (Block::lets_in)
    bool has_begun = false;
    bool has_ended = false;
    uint64_t owner = 0;          // the owner in Edges that stands for this grid
    std::vector<Region> arrays;  // arrays among the arguments, and the arguments themselves
    // Memory that the machine does not know, and that the kernel may access nevertheless
    // (Machine::is_explained()): the pointers that lead there, and the parts that the kernel has
    // accessed. These parts may contain pointers to more such memory.
    std::vector<uint64_t> foreign_pointers;
    std::map<uint64_t, Region> foreign_parts;
    CodeRange code;  // code of the kernel's library
    CallLog calls;
    // What the launch's blocks have collected so far, for exchanges in which some of them have not
    // collected yet. Keyed by communicator, KcclReach and epoch of the exchange.
    std::map<std::tuple<uint64_t, uint32_t, uint32_t>, Collected> collected;
    // Set when a communicator that the kernel uses has failed. From then on the threads may make
    // different calls, so their calls are not compared.
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
    std::deque<std::shared_ptr<Grid>> launches;  // launches that have not ended, in order
    Known known;                                 // what all launches on this stream that have ended
                                                 // knew
};

struct Rank {
    // What the rank's program does. kRunning: something between two launches. kInLaunch: it waits
    // for the end of its launch. kOutside: it waits for other ranks by means that the machine does
    // not know. kLeft: it makes no more launches.
    enum HostState : uint8_t { kRunning, kInLaunch, kOutside, kLeft };

    // If each rank has a host thread (hosts.cpp), only streams[0] is used.
    std::deque<Stream> streams = std::deque<Stream>(1);
    uint32_t num_blocks = 0;  // blocks of launches that run
    HostState host = kRunning;
    uint64_t running_since_ns = 0;  // when `host` last changed, by the host's clock
};

}  // namespace kccl::sim
