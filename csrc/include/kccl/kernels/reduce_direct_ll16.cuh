// reduce, direct, ll16, push: the root ends with the reduction of all ranks' arrays.
//
//     rank r:  in --pack--> slot[r] in the root's window    2 * n bytes out
//     root:    slot[0..] of its own window --reduce--> out
//
// n is the length of the message in bytes. Only the root waits for its peers. So the call is
// credited: the next call begins by waiting until all ranks have entered this one (channel.cuh),
// and the peers are never more than one call ahead of the root. all_reduce_one_shot_ll16.cuh
// explains slots and rounds.
#pragma once

#include "../exchange.cuh"
#include "../reduce.cuh"

namespace kccl {

// Sets the root's `out` to the reduction of all ranks' `in`. Both hold `count` elements of T, at
// most channel.max_bytes() bytes. Only the root writes `out`, which is `in` or does not overlap it.
// Both may be reused on return. Called by all threads of the channel's coop (a thread, warp or
// block: coop.cuh). All threads get the same status; unless it is ok, the root's `out` is
// undefined.
template <class T, class Op, class Coop, int WORLD_SIZE>
KCCL_DEVICE Status reduce_direct_ll16(Channel<Coop, WORLD_SIZE>& channel, T* out, const T* in,
                                      uint32_t count, int root, const Op& op = Op{}) {
    constexpr uint32_t kUnit = kUnitPayloads<T>;
    const int rank = channel.comm().rank;
    const auto send = [&](uint32_t i, bool are_words) {
        uint64_t unit[kUnit];
        load_unit(unit, in, i, count, are_words);
        for (uint32_t n = 0; n < kUnit; ++n) {
            ll16::push_to_rank(channel, root, i * kUnit + n, unit[n]);
        }
    };
    const auto take = [&, op](uint32_t i, bool is_mine, bool are_words) {
        if (rank != root) return true;
        uint64_t units[kMaxRanks<WORLD_SIZE> * kUnit];
        if (!ll16::await_units<kUnit>(channel, i, units)) return false;
        uint64_t reduced[kUnit];
        reduce_unit<T, Op, kMaxRanks<WORLD_SIZE>>(reduced, units, kUnit, channel.world_size(), op);
        if (is_mine) store_unit(out, i, count, reduced, are_words);
        return true;
    };
    return ll16::exchange<platform::DefaultFloats>(channel, kKcclReduceDirectLl16,
                                                   Exchange::kCredited, num_units<T>(count), false,
                                                   send, take);
}

namespace kernels {

template <class T, class Op, int WORLD_SIZE>
KCCL_KERNEL void reduce_direct_ll16(KCCL_KERNEL_PARAM(KcclCall) parameter) {
    const KcclCall& call = platform::first_parameter(parameter);
    Channel<Block, WORLD_SIZE> channel(call, sizeof(T));
    const Slice slice = call_slice<T>(call);
    prefetch_slice<T>(call, slice);
    const Op op = operator_of<Op>(call);
    in_rounds<T>(channel, call, slice, call.comm.layout.packet_bytes,
                 [&, op](T* out, const T* in, uint32_t count) {
                     return kccl::reduce_direct_ll16<T, Op>(channel, out, in, count, call.peer, op);
                 });
}

}  // namespace kernels
}  // namespace kccl
