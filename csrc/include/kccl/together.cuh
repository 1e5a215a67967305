// Tells the simulator about calls that all threads of a coop make together. The simulator compares
// the threads' calls, and names threads that are missing. On other targets this compiles to
// nothing.
#pragma once

#include "coop.cuh"

namespace kccl {

enum class CoopKind : uint32_t { kThread, kWarp, kBlock, kGrid };

// The kind of a coop. A coop of the user's own type counts as single threads, and nothing is
// compared: the simulator does not know which threads belong to it.
template <class Coop>
constexpr CoopKind kCoopKind = CoopKind::kThread;
template <>
inline constexpr CoopKind kCoopKind<Warp> = CoopKind::kWarp;
template <>
inline constexpr CoopKind kCoopKind<Block> = CoopKind::kBlock;

// What a call does in an exchange between blocks.
enum class ExchangeStep : uint32_t { kNone, kOpen, kPublish, kCollect, kClose };

// An argument of a call, by its name in the call's declaration. num_bytes: the length of an array
// that any thread of the coop may read in the call. So the coop must have synchronised after the
// last write to the array.
struct Given {
    KCCL_DEVICE Given(const char* name, uint64_t value) : name(name), value(value) {}
    KCCL_DEVICE Given(const char* name, const void* value, uint64_t num_bytes = 0)
        : name(name), value(reinterpret_cast<uint64_t>(value)), num_bytes(num_bytes) {}
    const char* name;
    uint64_t value;
    uint64_t num_bytes = 0;
};

// What a call does with an exchange between blocks, for the simulator's checks.
struct ExchangeUse {
    ExchangeStep step = ExchangeStep::kNone;
    uint32_t reach = 0;
    uint64_t num_bytes = 0;  // bytes of a slice
};

// Tells the simulator that this thread begins the call `name` of its coop. All threads of the coop
// must give the same arguments. In a call of the grid only the threads of a block must do so, and
// all blocks must agree on the first `num_common` arguments.
template <CoopKind KIND, uint32_t NUM>
KCCL_DEVICE void begin_together([[maybe_unused]] const DeviceComm& comm,
                                [[maybe_unused]] const char* name,
                                [[maybe_unused]] const Given (&given)[NUM],
                                [[maybe_unused]] uint32_t num_common = NUM,
                                [[maybe_unused]] ExchangeUse use = {}) {
#if defined(KCCL_TARGET_SIM)
    KcclSimArgument arguments[NUM];
    for (uint32_t i = 0; i < NUM; ++i)
        arguments[i] = {given[i].name, given[i].value, given[i].num_bytes};
    const KcclSimCoopCall call = {
        name,       static_cast<uint32_t>(KIND),     comm.state, arguments,    NUM,
        num_common, static_cast<uint32_t>(use.step), use.reach,  use.num_bytes};
    kccl_sim_engine->begin_together(&call);
#endif
}

}  // namespace kccl
