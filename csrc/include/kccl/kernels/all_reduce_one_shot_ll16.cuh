// all_reduce, one_shot, ll16, push: for the smallest messages, where latency is everything.
//
//     rank r:  in --pack--> slot[r] in every rank's window    (world_size - 1) * 2 * n bytes out
//              slot[0..] of its own window --reduce--> out        polls its own memory only
//
// n is the length of the message in bytes. A packet (ll16.cuh) carries 8 bytes of it, and the
// call's epoch as flag, so there is no barrier. Each rank has slots for the packets of one call
// from each source: slot[r] for those of rank r. There are two sets of slots, for calls of even and
// odd epochs; channel.cuh says why the call after the next may overwrite the slots of this one. A
// message that is longer than a slot is sent in rounds, each a call of its own on the channel.
#pragma once

#include "../exchange.cuh"
#include "../reduce.cuh"

namespace kccl {

// Sets every rank's `out` to the reduction of all ranks' `in`. `out` and `in` hold `count` elements
// of T, at most channel.max_bytes() bytes. They are the same array or do not overlap, and may be
// reused on return. Called by all threads of the channel's coop (a thread, warp or block:
// coop.cuh). All threads get the same status; unless it is ok, `out` is undefined.
template <class T, class Op, class Coop, int WORLD_SIZE>
KCCL_DEVICE Status all_reduce_one_shot_ll16(Channel<Coop, WORLD_SIZE>& channel, T* out, const T* in,
                                            uint32_t count, const Op& op = Op{}) {
    constexpr uint32_t kUnit = kUnitPayloads<T>;
    const auto send = [&](uint32_t i, bool are_words) {
        uint64_t unit[kUnit];
        load_unit(unit, in, i, count, are_words);
        for (uint32_t n = 0; n < kUnit; ++n) ll16::push(channel, i * kUnit + n, unit[n]);
    };
    const auto take = [&, op](uint32_t i, bool is_mine, bool are_words) {
        uint64_t units[kMaxRanks<WORLD_SIZE> * kUnit];
        if (!ll16::await_units<kUnit>(channel, i, units)) return false;
        uint64_t reduced[kUnit];
        reduce_unit<T, Op, kMaxRanks<WORLD_SIZE>>(reduced, units, kUnit, channel.world_size(), op);
        if (is_mine) store_unit(out, i, count, reduced, are_words);
        return true;
    };
    return ll16::exchange<platform::DefaultFloats>(
        channel, kKcclAllReduceOneShotLl16, Exchange::kPairwise, num_units<T>(count),
        are_words(in, count) && are_words(out, count), send, take);
}

namespace kernels {

template <class T, class Op, int WORLD_SIZE>
KCCL_KERNEL void all_reduce_one_shot_ll16(KCCL_KERNEL_PARAM(KcclCall) parameter) {
    const KcclCall& call = platform::first_parameter(parameter);
    Channel<Block, WORLD_SIZE> channel(call, sizeof(T));
    const Slice slice = call_slice<T>(call);
    prefetch_slice<T>(call, slice);
    const Op op = operator_of<Op>(call);
    in_rounds<T>(channel, call, slice, call.comm.layout.packet_bytes,
                 [&, op](T* out, const T* in, uint32_t count) {
                     return kccl::all_reduce_one_shot_ll16<T, Op>(channel, out, in, count, op);
                 });
}

}  // namespace kernels
}  // namespace kccl
