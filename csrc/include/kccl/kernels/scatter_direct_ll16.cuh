// scatter, direct, ll16, push: each rank ends with its chunk of the root's array.
//
//     root:    chunk p of in --pack--> slot[root] of rank p    (world_size - 1) * 2 * n bytes out
//     rank r:  slot[root] of its own window --> out            the root's own chunk, too
//
// n is the length of one chunk. Payloads are bytes, so every bit pattern arrives unchanged. The
// root does not wait for its peers. So the call is credited: the next call begins by waiting until
// all ranks have entered this one (channel.cuh). all_reduce_one_shot_ll16.cuh explains slots and
// rounds.
#pragma once

#include "../exchange.cuh"

namespace kccl {

// Copies the root's chunk at in + p * stride to the `out` of each rank p. A chunk has `count`
// bytes, at most channel.max_bytes(). Only the root reads `in`. The root's `out` is its chunk of
// `in`, or does not overlap `in`. Both may be reused on return. Called by all threads of the
// channel's coop (a thread, warp or block: coop.cuh). All threads get the same status; unless it is
// ok, `out` is undefined.
template <class Coop, int WORLD_SIZE>
KCCL_DEVICE Status scatter_direct_ll16(Channel<Coop, WORLD_SIZE>& channel, uint8_t* out,
                                       const uint8_t* in, uint32_t count, uint64_t stride,
                                       int root) {
    const bool is_root = channel.comm().rank == root;
    const auto send = [&](uint32_t i, bool are_words) {
        if (!is_root) return;
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
        uint64_t payload;
        if (!ll16::await_one(channel, root, i, &payload)) return false;
        if (is_mine) store_payload(out, i, count, payload, are_words);
        return true;
    };
    return ll16::exchange(channel, kKcclScatterDirectLl16, Exchange::kCredited,
                          num_payloads<uint8_t>(count), false, send, take);
}

namespace kernels {

template <int WORLD_SIZE>
KCCL_KERNEL void scatter_direct_ll16(KCCL_KERNEL_PARAM(KcclCall) parameter) {
    const KcclCall& call = platform::first_parameter(parameter);
    Channel<Block, WORLD_SIZE> channel(call, call.comm.world_size);
    const Slice slice = call_slice<uint8_t>(call);
    in_rounds<uint8_t>(channel, call, slice, call.comm.layout.packet_bytes,
                       [&](uint8_t* out, const uint8_t* in, uint32_t count) {
                           return kccl::scatter_direct_ll16(channel, out, in, count, call.count,
                                                            call.peer);
                       });
}

}  // namespace kernels
}  // namespace kccl
