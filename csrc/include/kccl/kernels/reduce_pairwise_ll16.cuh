// reduce, pairwise, ll16, push: the root ends with the reduction of all ranks' arrays.
//
//     rank r:  in --pack--> slot[r] in the root's window    2 * n bytes out
//              one empty packet to every rank but the root, itself included
//                                                           16 bytes each
//     root:    slot[0..] of its own window --reduce--> out
//     others:  wait for one packet of every rank
//
// n is the length of the message in bytes. Each rank waits for a packet of every peer, so the call
// is pairwise: the next call has no credit to wait for (channel.cuh). On GPUs that takes less time
// than the credits of reduce_direct_ll16.cuh, by a trial (bench/LOG.md). But no rank returns before
// all have entered the call. all_reduce_one_shot_ll16.cuh explains slots and rounds.
#pragma once

#include "../exchange.cuh"
#include "../reduce.cuh"

namespace kccl {

// Sets the root's `out` to the reduction of all ranks' `in`. All is as in reduce_direct_ll16().
template <class T, class Op, class Coop, int WORLD_SIZE>
KCCL_DEVICE Status reduce_pairwise_ll16(Channel<Coop, WORLD_SIZE>& channel, T* out, const T* in,
                                        uint32_t count, int root, const Op& op = Op{}) {
    constexpr uint32_t kUnit = kUnitPayloads<T>;
    const int rank = channel.comm().rank;
    const auto send = [&](uint32_t i, bool are_words) {
        uint64_t unit[kUnit];
        load_unit(unit, in, i, count, are_words);
        for (uint32_t n = 0; n < kUnit; ++n) {
            ll16::push_to_rank(channel, root, i * kUnit + n, unit[n]);
        }
        if (i != 0) return;
        KCCL_UNROLL
        for (int k = 0; k < kMaxRanks<WORLD_SIZE>; ++k) {
            if (k >= channel.world_size()) break;
            if (channel.receiver(k) != root) ll16::push_to(channel, k, 0, 0);
        }
    };
    const auto take = [&, op](uint32_t i, bool is_mine, bool are_words) {
        if (rank != root) {
            uint64_t empty[kMaxRanks<WORLD_SIZE>];
            return ll16::await_all(channel, 0, empty);
        }
        uint64_t units[kMaxRanks<WORLD_SIZE> * kUnit];
        if (!ll16::await_units<kUnit>(channel, i, units)) return false;
        uint64_t reduced[kUnit];
        reduce_unit<T, Op, kMaxRanks<WORLD_SIZE>>(reduced, units, kUnit, channel.world_size(), op);
        if (is_mine) store_unit(out, i, count, reduced, are_words);
        return true;
    };
    return ll16::exchange<platform::DefaultFloats>(
        channel, kKcclReducePairwiseLl16, Exchange::kPairwise, num_units<T>(count),
        are_words(in, count) && are_words(out, count), send, take);
}

namespace kernels {

template <class T, class Op, int WORLD_SIZE>
KCCL_KERNEL void reduce_pairwise_ll16(KCCL_KERNEL_PARAM(KcclCall) parameter) {
    const KcclCall& call = platform::first_parameter(parameter);
    Channel<Block, WORLD_SIZE> channel(call, sizeof(T));
    const Slice slice = call_slice<T>(call);
    prefetch_slice<T>(call, slice);
    const Op op = operator_of<Op>(call);
    in_rounds<T>(channel, call, slice, call.comm.layout.packet_bytes,
                 [&, op](T* out, const T* in, uint32_t count) {
                     return kccl::reduce_pairwise_ll16<T, Op>(channel, out, in, count, call.peer,
                                                              op);
                 });
}

}  // namespace kernels
}  // namespace kccl
