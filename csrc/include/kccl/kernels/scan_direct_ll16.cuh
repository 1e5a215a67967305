// scan, direct, ll16, push: rank r ends with the reduction of the arrays of ranks 0 to r, or of
// ranks 0 to r - 1 if the scan is exclusive.
//
//     rank r:  in --pack--> slot[r] in every rank's window    (world_size - 1) * 2 * n bytes out
//              slot[0..r] of its own window --reduce--> out       polls its own memory only
//
// n is the length of the message in bytes. Lower ranks do not need this rank's array, but it is
// sent to them too. So the call is pairwise, like all_reduce: it ends only when every peer has been
// heard from, and needs no credits (channel.cuh). all_reduce_one_shot_ll16.cuh explains slots and
// rounds.
#pragma once

#include "../exchange.cuh"
#include "../reduce.cuh"

namespace kccl {

// Sets `out` to the reduction of the `in` of ranks 0 to this one. If `exclusive` is 1 instead of 0,
// this rank's own `in` is left out, and rank 0 does not write its `out`. `out` and `in` hold
// `count` elements of T, at most channel.max_bytes() bytes. They are the same array or do not
// overlap, and may be reused on return. Called by all threads of the channel's coop (a thread, warp
// or block: coop.cuh). All threads get the same status; unless it is ok, `out` is undefined.
template <class T, class Op, class Coop, int WORLD_SIZE>
KCCL_DEVICE Status scan_direct_ll16(Channel<Coop, WORLD_SIZE>& channel, T* out, const T* in,
                                    uint32_t count, int exclusive, const Op& op = Op{}) {
    constexpr uint32_t kUnit = kUnitPayloads<T>;
    const int num_terms = channel.comm().rank + 1 - exclusive;
    const auto send = [&](uint32_t i, bool are_words) {
        uint64_t unit[kUnit];
        load_unit(unit, in, i, count, are_words);
        for (uint32_t n = 0; n < kUnit; ++n) ll16::push(channel, i * kUnit + n, unit[n]);
    };
    const auto take = [&, op](uint32_t i, bool is_mine, bool are_words) {
        uint64_t units[kMaxRanks<WORLD_SIZE> * kUnit];
        if (!ll16::await_units<kUnit>(channel, i, units)) return false;
        if (num_terms == 0 || !is_mine) return true;
        uint64_t reduced[kUnit];
        reduce_unit<T, Op, kMaxRanks<WORLD_SIZE>>(reduced, units, kUnit, num_terms, op);
        store_unit(out, i, count, reduced, are_words);
        return true;
    };
    return ll16::exchange<platform::DefaultFloats>(
        channel, kKcclScanDirectLl16, Exchange::kPairwise, num_units<T>(count),
        are_words(in, count) && are_words(out, count), send, take);
}

namespace kernels {

template <class T, class Op, int WORLD_SIZE>
KCCL_KERNEL void scan_direct_ll16(KCCL_KERNEL_PARAM(KcclCall) parameter) {
    const KcclCall& call = platform::first_parameter(parameter);
    Channel<Block, WORLD_SIZE> channel(call, sizeof(T));
    const Slice slice = call_slice<T>(call);
    prefetch_slice<T>(call, slice);
    const Op op = operator_of<Op>(call);
    in_rounds<T>(channel, call, slice, call.comm.layout.packet_bytes,
                 [&, op](T* out, const T* in, uint32_t count) {
                     return kccl::scan_direct_ll16<T, Op>(channel, out, in, count, call.peer, op);
                 });
}

}  // namespace kernels
}  // namespace kccl
