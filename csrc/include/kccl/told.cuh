// What kernels tell the simulator about their calls, and ask it, so that it finds mistakes which no
// GPU can notice at no cost. Nothing of it is left on other targets.
#pragma once

#include "coop.cuh"

namespace kccl::told {

#if defined(KCCL_TARGET_SIM)
constexpr bool kIsTold = true;
#else
constexpr bool kIsTold = false;
#endif

// How many bytes a window of some rank has from `address` on; 0: it lies in no window. On other
// targets nobody knows, and every address will do.
KCCL_DEVICE uint64_t window_room([[maybe_unused]] const void* address) {
#if defined(KCCL_TARGET_SIM)
    return kccl_sim_engine->window_room(address);
#else
    return ~uint64_t{0};
#endif
}

}  // namespace kccl::told
