// all_gather, direct, ll16, push: every rank ends with the inputs of all ranks, in rank order.
//
//     rank r:  in --pack--> slot[r] in every rank's window    (world_size - 1) * 2 * n bytes out
//              slot[p] of its own window --> chunk p of out       polls its own memory only
//
// n is the length of `in` in bytes. Payloads are bytes, so every bit pattern arrives unchanged.
// all_reduce_one_shot_ll16.cuh explains slots and rounds.
#pragma once

#include "../exchange.cuh"

namespace kccl {

// Copies the `in` of each rank p to out + p * stride on every rank. `in` holds `count` bytes, at
// most channel.max_bytes(). `in` is this rank's chunk of `out`, or does not overlap `out`; both may
// be reused on return. Called by all threads of the channel's coop (a thread, warp or block:
// coop.cuh). All threads get the same status; unless it is ok, `out` is undefined.
template <class Coop, int WORLD_SIZE>
KCCL_DEVICE Status all_gather_direct_ll16(Channel<Coop, WORLD_SIZE>& channel, uint8_t* out,
                                          const uint8_t* in, uint32_t count, uint64_t stride) {
    const auto send = [&](uint32_t i, bool are_words) {
        ll16::push(channel, i, load_payload(in, i, count, are_words));
    };
    const auto take = [&](uint32_t i, bool is_mine, bool are_words) {
        uint64_t payloads[kMaxRanks<WORLD_SIZE>];
        if (!ll16::await_all(channel, i, payloads)) return false;
        KCCL_UNROLL
        for (int source = 0; source < kMaxRanks<WORLD_SIZE>; ++source) {
            if (source >= channel.world_size() || !is_mine) break;
            store_payload(out + source * stride, i, count, payloads[source], are_words);
        }
        return true;
    };
    return ll16::exchange(channel, kKcclAllGatherDirectLl16, Exchange::kPairwise,
                          num_payloads<uint8_t>(count),
                          are_words(in, count) && are_words(out, stride, count), send, take);
}

namespace kernels {

template <int WORLD_SIZE>
KCCL_KERNEL void all_gather_direct_ll16(KCCL_KERNEL_PARAM(KcclCall) parameter) {
    const KcclCall& call = platform::first_parameter(parameter);
    Channel<Block, WORLD_SIZE> channel(call, 1);
    const Slice slice = call_slice<uint8_t>(call);
    prefetch_slice<uint8_t>(call, slice);
    in_rounds<uint8_t>(channel, call, slice, call.comm.layout.packet_bytes,
                       [&](uint8_t* out, const uint8_t* in, uint32_t count) {
                           return kccl::all_gather_direct_ll16(channel, out, in, count, call.count);
                       });
}

}  // namespace kernels
}  // namespace kccl
