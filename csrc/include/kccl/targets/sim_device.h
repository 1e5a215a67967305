// The functions that a kernel calls if it is compiled for the simulator. The engine is in another
// shared library, so the calls go through a table, which the kernel's library gets before its first
// launch (module.inc).
//
// Every function knows its caller by the return address; reports turn that into a source line.
#pragma once

#include <stdint.h>

extern "C" {

// The facts that kernels ask about the running thread.
struct KcclSimThread {
    uint32_t thread_in_block;
    uint32_t threads_per_block;
    uint32_t block_in_grid;
    uint32_t blocks_per_grid;
    // Memory that no other thread writes: this thread's stack and the launch's arguments.
    uint64_t stack;
    uint64_t stack_bytes;
    uint64_t arguments;
    uint64_t argument_bytes;
};

// A call as one rank makes it, or as one block makes it in an exchange of the grid. All callers
// must agree on the fields behind `epoch`.
struct KcclSimCall {
    uint64_t memory;  // an address that identifies the ranks or blocks that make the call together
    uint64_t state;   // address of the rank's KcclState
    int32_t stream;   // the scratch channel; of an exchange: -1 - KcclReach
    int32_t channel;  // the user's number of the channel; -1 if none
    uint32_t rank;
    uint32_t num_callers;  // how many ranks, or blocks of ranks, make the call
    uint32_t epoch;        // epoch of an exchange; 0 in other calls
    uint32_t kernel;
    uint64_t num_bytes;   // bytes of the message; of an exchange: of a slice
    uint32_t dtype;       // kKcclNumDtypes: not known
    uint32_t op;          // kKcclNumOps: none
    int32_t root;         // -1: none
    uint32_t num_blocks;  // blocks of the grid that makes the call; 0 if none does
};

// A coop, one of whose threads opens or closes a channel.
struct KcclSimOpening {
    uint64_t memory;  // address of the rank's scratch
    int32_t index;    // the scratch channel
    int32_t channel;
    uint32_t first_thread;
    uint32_t num_threads;
};

struct KcclSimArgument {
    const char* name;
    uint64_t value;
    uint64_t num_bytes;  // bytes at `value` that any thread of the coop may read in the call; or 0
};

// An argument with which a call cannot be made. Texts live as long as the kernel's library.
struct KcclSimRefusal {
    const char* call;
    const char* argument;
    uint64_t value;
    const char* must;  // as in "at most {}, the bytes of a stage", where {} is the limit
    uint64_t limit;
};

// A call that all threads of a coop make together. Names live as long as the kernel's library.
struct KcclSimCoopCall {
    const char* name;
    uint32_t coop;   // kccl::CoopKind
    uint64_t state;  // identifies the communicator
    const KcclSimArgument* arguments;
    uint32_t num_arguments;
    uint32_t num_common;  // of a grid: how many first arguments must be the same in all blocks
    // The members below are used only in exchanges between blocks.
    uint32_t step;  // kccl::ExchangeStep
    uint32_t reach;
    uint64_t num_bytes;  // bytes of a slice
};

// Orders and scopes are the values of mem::Order and mem::Scope.
struct KcclSimEngine {
    KcclSimThread* const* self;

    uint64_t (*load)(const void* address, uint32_t num_bytes, uint32_t order, uint32_t scope);
    void (*store)(void* address, uint64_t value, uint32_t num_bytes, uint32_t order,
                  uint32_t scope);
    // Load and store 16 bytes, relaxed, in single-copy atomic units of unit_bytes.
    void (*load_packet)(const void* address, uint64_t* halves, uint32_t unit_bytes, uint32_t scope);
    void (*store_packet)(void* address, const uint64_t* halves, uint32_t unit_bytes,
                         uint32_t scope);
    uint32_t (*claim)(uint32_t* address, uint32_t value);
    // Adds `value` to the word, and returns the sum.
    uint32_t (*add)(uint32_t* address, uint32_t value, uint32_t order, uint32_t scope);
    void (*fence)(uint32_t order, uint32_t scope);
    void (*fence_packets)(void);

    // Announce plain accesses, which the kernel then makes itself. The address must be a multiple
    // of `alignment`, as on a GPU.
    void (*read)(const void* address, uint64_t num_bytes, uint64_t alignment, const void* site);
    void (*write)(const void* address, uint64_t num_bytes, uint64_t alignment, const void* site);

    // fenced: whether there are fences around AMD's barrier, which itself waits for no stores.
    void (*meet_block)(uint32_t fenced);
    void (*meet_warp)(void);
    uint32_t (*block_any)(uint32_t mine);
    uint64_t (*warp_ballot)(uint32_t mine);
    uint64_t (*shuffle)(uint64_t value, uint32_t source_lane);
    void (*await_kernels_before)(void);
    void (*launch_dependents)(void);
    // Returns the block's instance of the shared variable that is declared at `declaration`.
    void* (*shared)(const void* declaration, uint64_t num_bytes, uint64_t alignment);
    void* (*dynamic_shared)(void);

    uint64_t (*clock_ns)(void);
    void (*poll_pause)(void);
    uint32_t (*idle)(uint64_t idle_context, uint32_t missing, uint32_t* gone);
    void (*tell_host)(uint64_t idle_context, uint32_t status, const void* record);

    // Returns whether the simulated machine copies asynchronously. Then the next five functions are
    // used, with the engine's own mem::CopyBarriers. Otherwise the device source copies through
    // registers (mem_copies.cuh).
    uint32_t (*copies_late)(void);
    void (*barrier_init)(void* barrier, uint32_t arrivals);
    void (*barrier_arrive)(void* barrier, uint32_t num_bytes);
    uint32_t (*barrier_has_completed)(const void* barrier, uint32_t parity);
    void (*copy_async)(void* to, const void* from, uint32_t num_bytes, void* barrier);
    void (*fence_copies)(void);

    // Tells the machine that the calling thread is in this call from here on. Reports name the
    // call, and it decides which words are stale. `state` identifies the communicator.
    void (*enter_call)(uint64_t state, uint32_t kernel, int32_t channel, uint32_t epoch);

    // The functions of told.cuh call these.
    uint64_t (*window_room)(const void* address);
    void (*call_begins)(const KcclSimCall* call);
    void (*channel_opens)(const KcclSimOpening* opening);
    void (*channel_closes)(const KcclSimOpening* opening);
    // Do memmove() and memset(), and announce no accesses.
    void* (*move_bytes)(void* to, const void* from, uint64_t num_bytes);
    void* (*fill_bytes)(void* to, int value, uint64_t num_bytes);
    // The thread cannot go on: it has written beyond the end of a local array, or an assert() does
    // not hold. The functions do not return. If `site` is null, reports name the place of the call.
    // The text lives as long as the kernel's library.
    void (*stop_overrun)(const void* site);
    void (*stop_assertion)(const char* text, const void* site);
    // Tells the machine that the calling thread begins a call of its coop. The machine compares
    // what the coop's threads call.
    void (*begin_together)(const KcclSimCoopCall* call);
    // Reports that the calling thread makes a call with a wrong argument.
    void (*refuse_argument)(const KcclSimRefusal* refusal);
};

extern const KcclSimEngine* kccl_sim_engine;
}
