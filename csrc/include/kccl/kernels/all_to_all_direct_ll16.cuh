// all_to_all, direct, ll16, push: chunk p of each rank's array goes to rank p.
//
//     rank r:  chunk p of in --pack--> slot[r] of rank p    (world_size - 1) * 2 * n bytes out
//              slot[p] of its own window --> chunk p of out       polls its own memory only
//
// n is the length of one chunk. Payloads are bytes, so every bit pattern arrives unchanged. `out`
// may be `in`: before a thread stores payload i of any chunk, it has pushed payload i of all
// chunks. all_reduce_one_shot_ll16.cuh explains slots and rounds.
#pragma once

#include "../exchange.cuh"

namespace kccl {

// Sends the chunk at in + p * stride to each rank p, and stores the chunk from rank p at out + p *
// stride. A chunk has `count` bytes, at most channel.max_bytes(). `out` is `in` or does not overlap
// it; both may be reused on return. Called by all threads of the channel's coop (a thread, warp or
// block: coop.cuh). All threads get the same status; unless it is ok, `out` is undefined.
template <class Coop, int WORLD_SIZE>
KCCL_DEVICE Status all_to_all_direct_ll16(Channel<Coop, WORLD_SIZE>& channel, uint8_t* out,
                                          const uint8_t* in, uint32_t count, uint64_t stride) {
    const auto send = [&](uint32_t i, bool are_words) {
        // Loads the payloads for all receivers before it pushes any, so that the load latencies
        // overlap.
        uint64_t payloads[kMaxRanks<WORLD_SIZE>];
        KCCL_UNROLL
        for (int k = 0; k < kMaxRanks<WORLD_SIZE>; ++k) {
            if (k >= channel.world_size()) break;
            payloads[k] = load_payload(in + channel.receiver(k) * stride, i, count, are_words);
        }
        KCCL_UNROLL
        for (int k = 0; k < kMaxRanks<WORLD_SIZE>; ++k) {
            if (k < channel.world_size()) ll16::push_to(channel, k, i, payloads[k]);
        }
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
    return ll16::exchange(
        channel, kKcclAllToAllDirectLl16, Exchange::kPairwise, num_payloads<uint8_t>(count),
        are_words(in, stride, count) && are_words(out, stride, count), send, take);
}

namespace kernels {

template <int WORLD_SIZE>
KCCL_KERNEL void all_to_all_direct_ll16(KCCL_KERNEL_PARAM(KcclCall) parameter) {
    const KcclCall& call = platform::first_parameter(parameter);
    Channel<Block, WORLD_SIZE> channel(call, call.comm.world_size);
    const Slice slice = call_slice<uint8_t>(call);
    in_rounds<uint8_t>(channel, call, slice, call.comm.layout.packet_bytes,
                       [&](uint8_t* out, const uint8_t* in, uint32_t count) {
                           return kccl::all_to_all_direct_ll16(channel, out, in, count, call.count);
                       });
}

}  // namespace kernels
}  // namespace kccl
