// How the simulator makes the calls of all_reduce: see made.cuh.
#pragma once

#include <kccl/kernels/all_reduce_one_shot_pull_simple.cuh>
#include <kccl/kernels/all_reduce_one_shot_sentinel.cuh>
#include <kccl/kernels/all_reduce_two_shot_push_simple.cuh>
#include <kccl/kernels/all_reduce_two_shot_sentinel.cuh>

#include "made.cuh"

namespace kccl {

template <>
struct Made<kKcclAllReduceOneShotLl16> : IsMade {
    template <class T, class Op, class Coop>
    KCCL_DEVICE static Status make(Channel<Coop>& channel, const Call& call) {
        return make_in_rounds<T>(channel, call, [&](T* out, const T* in, uint32_t count) {
            return all_reduce_one_shot_ll16<T, Op>(channel, out, in, count);
        });
    }
};

template <>
struct Made<kKcclAllReduceOneShotSentinel> : IsMade {
    template <class T, class Op, class Coop>
    KCCL_DEVICE static Status make(Channel<Coop>& channel, const Call& call) {
        return make_in_rounds<T>(channel, call, [&](T* out, const T* in, uint32_t count) {
            return all_reduce_one_shot_sentinel<T, Op>(channel, out, in, count);
        });
    }
};

template <>
struct Made<kKcclAllReduceTwoShotSentinel> : IsMade {
    template <class T, class Op, class Coop>
    KCCL_DEVICE static Status make(Channel<Coop>& channel, const Call& call) {
        return make_in_rounds<T>(
            channel, call,
            [&](T* out, const T* in, uint32_t count) {
                return all_reduce_two_shot_sentinel<T, Op>(channel, out, in, count);
            },
            two_shot_sentinel_bytes(channel.comm()));
    }
};

template <>
struct Made<kKcclAllReduceTwoShotPushSimple> : IsMade {
    template <class T, class Op, class Coop>
    KCCL_DEVICE static Status make(Channel<Coop>& channel, const Call& call) {
        return all_reduce_two_shot_push_simple<T, Op>(channel, output_of<T>(call),
                                                      input_of<T>(call), call.count);
    }
};

template <>
struct Made<kKcclAllReduceOneShotPullSimple> : IsMade {
    template <class T, class Op, class Coop>
    KCCL_DEVICE static Status make(Channel<Coop>& channel, const Call& call) {
        return all_reduce_one_shot_pull_simple<T, Op>(channel, output_of<T>(call),
                                                      input_of<T>(call), call.count);
    }
};

template <>
struct MadeByUsers<kKcclAllReduceOneShotLl16> : IsMade {
    template <class T, class Op, class By>
    KCCL_DEVICE static Status make(By& by, const Call& call) {
        return by([&](auto&&... of) {
            return all_reduce<T, Op>(of..., output_of<T>(call), input_of<T>(call), call.count);
        });
    }
};

}  // namespace kccl
