// How the simulator makes the calls of reduce_scatter: see made.cuh.
#pragma once

#include <kccl/kernels/reduce_scatter_pull_simple.cuh>
#include <kccl/kernels/reduce_scatter_push_simple.cuh>

#include "made.cuh"

namespace kccl {

template <>
struct Made<kKcclReduceScatterDirectLl16> : IsMade {
    template <class T, class Op, class Coop>
    KCCL_DEVICE static Status make(Channel<Coop>& channel, const Call& call) {
        return make_in_rounds<T>(channel, call, [&](T* out, const T* in, uint32_t count) {
            return reduce_scatter_direct_ll16<T, Op>(channel, out, in, count, call.count);
        });
    }
};

template <>
struct Made<kKcclReduceScatterPullSimple> : IsMade {
    template <class T, class Op, class Coop>
    KCCL_DEVICE static Status make(Channel<Coop>& channel, const Call& call) {
        return reduce_scatter_pull_simple<T, Op>(channel, output_of<T>(call), input_of<T>(call),
                                                 call.count, call.count);
    }
};

template <>
struct Made<kKcclReduceScatterPushSimple> : IsMade {
    template <class T, class Op, class Coop>
    KCCL_DEVICE static Status make(Channel<Coop>& channel, const Call& call) {
        return reduce_scatter_push_simple<T, Op>(channel, output_of<T>(call), input_of<T>(call),
                                                 call.count, call.count);
    }
};

template <>
struct MadeByUsers<kKcclReduceScatterDirectLl16> : IsMade {
    template <class T, class Op, class By>
    KCCL_DEVICE static Status make(By& by, const Call& call) {
        return by([&](auto&&... of) {
            return reduce_scatter<T, Op>(of..., output_of<T>(call), input_of<T>(call), call.count);
        });
    }
};

}  // namespace kccl
