// Which calls of a list the simulator makes, and how. tests/sim/sim_makes.py writes it for each
// kernel of a collective.
#pragma once

#include "copies.cuh"

namespace kccl {

// KERNELS: bits of the KcclKernel that the list may hold, so that no others are compiled.
template <uint64_t KERNELS>
KCCL_DEVICE constexpr bool has(uint32_t kernel) {
    return (KERNELS >> kernel & 1u) != 0;
}

struct IsMade {
    static constexpr bool kIsMade = true;
};
struct IsNotMade {
    static constexpr bool kIsMade = false;
};

// make<T, Op>(channel, call) of a kernel: called by all threads of the channel's coop.
template <uint32_t KERNEL>
struct Made : IsNotMade {};

// make<T, Op>(by, call) of a kernel that users' kernels call, made as they make it.
// by() calls what it is given with a channel, or with a coop or grid() and a DeviceComm.
template <uint32_t KERNEL>
struct MadeByUsers : IsNotMade {};

// For Made::make(): the whole call, in rounds of at most max_bytes. round: as in_rounds() takes it.
template <class T, class Coop, class Round>
KCCL_DEVICE Status make_in_rounds(Channel<Coop>& channel, const Call& call, Round round,
                                  uint64_t max_bytes) {
    return in_rounds<T>(channel, call, Slice{0, call.count}, max_bytes, round);
}

// Makes a call if WAY says how, else otherwise(). Tries the kernels from KERNEL on.
template <template <uint32_t> class WAY, uint64_t KERNELS, class T, class Op, uint32_t KERNEL = 0,
          class By, class Otherwise>
KCCL_DEVICE Status make_by(By& by, const Call& call, Otherwise otherwise) {
    if constexpr (KERNEL == kKcclNumKernels) {
        return otherwise();
    } else {
        if constexpr (has<KERNELS>(KERNEL) && WAY<KERNEL>::kIsMade) {
            if (call.kernel == KERNEL) return WAY<KERNEL>::template make<T, Op>(by, call);
        }
        return make_by<WAY, KERNELS, T, Op, KERNEL + 1>(by, call, otherwise);
    }
}

}  // namespace kccl
