// Tells the simulator about the calls that kernels make, and asks it about windows. So the
// simulator finds mistakes for which a GPU would need extra loads and checks in each call. On other
// targets these functions compile to nothing.
#pragma once

#include "coop.cuh"

namespace kccl::told {

#if defined(KCCL_TARGET_SIM)
constexpr bool kIsTold = true;
#else
constexpr bool kIsTold = false;
#endif

// Returns how many bytes a window of some rank has from `address` on, or 0 if the address lies in
// no window. On other targets the windows are not known, so any number of bytes is accepted.
KCCL_DEVICE uint64_t window_room([[maybe_unused]] const void* address) {
#if defined(KCCL_TARGET_SIM)
    return kccl_sim_engine->window_room(address);
#else
    return ~uint64_t{0};
#endif
}

// Tells the simulator that this thread makes a call with a wrong argument. `must`: as in
// KcclSimRefusal.
KCCL_DEVICE void refuse_argument([[maybe_unused]] const char* call,
                                 [[maybe_unused]] const char* argument,
                                 [[maybe_unused]] uint64_t value, [[maybe_unused]] const char* must,
                                 [[maybe_unused]] uint64_t limit = 0) {
#if defined(KCCL_TARGET_SIM)
    const KcclSimRefusal refusal = {call, argument, value, must, limit};
    kccl_sim_engine->refuse_argument(&refusal);
#endif
}

// The facts on which all ranks must agree when they make a call; see KcclSimCall.
struct Call {
    uint32_t kernel;  // KcclKernel or KcclNoKernel
    uint64_t num_bytes;
    uint32_t dtype = kKcclNumDtypes;
    uint32_t op = kKcclNumOps;  // kKcclNumOps in calls that reduce nothing
    int root = -1;
    uint32_t num_blocks = 0;
};

// Tells the simulator of a call. The simulator compares all calls with this `group`, `index` and
// `epoch`; `callers` is their number.
KCCL_DEVICE void compare([[maybe_unused]] const DeviceComm& comm, [[maybe_unused]] uint64_t group,
                         [[maybe_unused]] int32_t index, [[maybe_unused]] int32_t channel,
                         [[maybe_unused]] uint32_t callers, [[maybe_unused]] uint32_t epoch,
                         [[maybe_unused]] const Call& call) {
#if defined(KCCL_TARGET_SIM)
    const KcclSimCall made = {
        group,   comm.state, index,          channel,        static_cast<uint32_t>(comm.rank),
        callers, epoch,      call.kernel,    call.num_bytes, call.dtype,
        call.op, call.root,  call.num_blocks};
    kccl_sim_engine->call_begins(&made);
#endif
}

// Tells the simulator that this rank makes the next call on a channel. The simulator compares it
// with the other ranks' calls on this channel. Called by one thread. `index`: the scratch channel.
KCCL_DEVICE void call_begins(const DeviceComm& comm, int channel, int index, const Call& call) {
    compare(comm, comm.scratch[0], index, channel, static_cast<uint32_t>(comm.world_size), 0, call);
}

// Tells the simulator that this block publishes a slice in an exchange of the grid. Called by one
// thread of each block.
KCCL_DEVICE void slice_begins(const DeviceComm& comm, KcclReach reach, uint32_t epoch,
                              const Call& call) {
    const bool is_local = reach == kKcclReachRank;
    const uint32_t ranks = is_local ? 1 : static_cast<uint32_t>(comm.world_size);
    compare(comm, comm.scratch[is_local ? comm.rank : 0], -1 - static_cast<int32_t>(reach), -1,
            ranks * call.num_blocks, epoch, call);
}

// Tells the simulator by which operator this block reduces the slices of an exchange of all ranks.
// The simulator compares it with the operator of this block on the other ranks. Called by one
// thread of each block.
KCCL_DEVICE void reduction_begins(const DeviceComm& comm, uint32_t epoch, const Call& call) {
    const auto block = static_cast<int32_t>(platform::block_in_grid());
    compare(comm, comm.scratch[0], -1 - kKcclNumReaches - block, -1,
            static_cast<uint32_t>(comm.world_size), epoch, call);
}

#if defined(KCCL_TARGET_SIM)
template <class Coop>
KCCL_DEVICE KcclSimOpening opening_of(Coop coop, const DeviceComm& comm, int channel, int index) {
    const uint32_t first = platform::thread_in_block() - coop.index();
    return {comm.scratch[comm.rank], index, channel, first, coop.size()};
}
#endif

// Tells the simulator that the coop opens a channel. Called by all its threads. `index`: the
// scratch channel.
template <class Coop>
KCCL_DEVICE void channel_opens([[maybe_unused]] Coop coop, [[maybe_unused]] const DeviceComm& comm,
                               [[maybe_unused]] int channel, [[maybe_unused]] int index) {
#if defined(KCCL_TARGET_SIM)
    const KcclSimOpening opening = opening_of(coop, comm, channel, index);
    kccl_sim_engine->channel_opens(&opening);
#endif
}

// Tells the simulator that the coop closes a channel; also called if the channel was refused.
// Called by all threads of the coop (a thread, warp or block: coop.cuh).
template <class Coop>
KCCL_DEVICE void channel_closes([[maybe_unused]] Coop coop, [[maybe_unused]] const DeviceComm& comm,
                                [[maybe_unused]] int channel, [[maybe_unused]] int index) {
#if defined(KCCL_TARGET_SIM)
    const KcclSimOpening opening = opening_of(coop, comm, channel, index);
    kccl_sim_engine->channel_closes(&opening);
#endif
}

}  // namespace kccl::told
