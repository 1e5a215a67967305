// reduce_scatter, direct, ll16, push: rank p ends with the reduction of all ranks' chunk p.
//
//     rank r:  chunk p of in --pack--> slot[r] of rank p    (world_size - 1) * 2 * n bytes out
//              slot[0..] of its own window --reduce--> out  polls its own memory only
//
// n is the length of one chunk. all_reduce_one_shot_ll16.cuh explains slots and rounds.
#pragma once

#include "../exchange.cuh"
#include "../reduce.cuh"

namespace kccl {

// Sets `out` to the reduction of the chunks that all ranks have for this rank. The chunk for rank p
// is at in + p * stride. `out` and each chunk hold `count` elements of T, at most
// channel.max_bytes() bytes. `out` is this rank's chunk of `in`, or does not overlap `in`; both may
// be reused on return. Called by all threads of the channel's coop (a thread, warp or block:
// coop.cuh). All threads get the same status; unless it is ok, `out` is undefined.
template <class T, class Op, class Coop, int WORLD_SIZE>
KCCL_DEVICE Status reduce_scatter_direct_ll16(Channel<Coop, WORLD_SIZE>& channel, T* out,
                                              const T* in, uint32_t count, uint64_t stride,
                                              const Op& op = Op{}) {
    constexpr uint32_t kUnit = kUnitPayloads<T>;
    const auto send = [&](uint32_t i, bool are_words) {
        // Loads the units for all receivers before it pushes any, so that the load latencies
        // overlap.
        uint64_t units[kMaxRanks<WORLD_SIZE>][kUnit];
        KCCL_UNROLL
        for (int k = 0; k < kMaxRanks<WORLD_SIZE>; ++k) {
            if (k >= channel.world_size()) break;
            load_unit(units[k], in + channel.receiver(k) * stride, i, count, are_words);
        }
        KCCL_UNROLL
        for (int k = 0; k < kMaxRanks<WORLD_SIZE>; ++k) {
            if (k >= channel.world_size()) break;
            for (uint32_t n = 0; n < kUnit; ++n) {
                ll16::push_to(channel, k, i * kUnit + n, units[k][n]);
            }
        }
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
        channel, kKcclReduceScatterDirectLl16, Exchange::kPairwise, num_units<T>(count),
        are_words(in, stride, count) && are_words(out, count), send, take);
}

namespace kernels {

template <class T, class Op, int WORLD_SIZE>
KCCL_KERNEL void reduce_scatter_direct_ll16(KCCL_KERNEL_PARAM(KcclCall) parameter) {
    const KcclCall& call = platform::first_parameter(parameter);
    Channel<Block, WORLD_SIZE> channel(call, call.comm.world_size * sizeof(T));
    const Slice slice = call_slice<T>(call);
    const Op op = operator_of<Op>(call);
    in_rounds<T>(channel, call, slice, call.comm.layout.packet_bytes,
                 [&, op](T* out, const T* in, uint32_t count) {
                     return kccl::reduce_scatter_direct_ll16<T, Op>(channel, out, in, count,
                                                                    call.count, op);
                 });
}

}  // namespace kernels
}  // namespace kccl
