// broadcast, direct, ll16, push: the root writes packets into every peer's window.
//
//     root:    in --pack--> slot[root] in every peer's window   (world_size - 1) * 2 * n bytes out
//     others:  slot[root] of their own window --> out
//
// Payloads are bytes, so every bit pattern arrives unchanged. n is the length of the message in
// bytes. The root does not wait for its peers. So the call is credited: the next call begins by
// waiting until all ranks have entered this one (channel.cuh), and the root is never more than one
// call ahead of its peers.
#pragma once

#include "../exchange.cuh"

namespace kccl {

// Copies the root's `in` to the `out` of all other ranks. Only the root reads `in`, and only the
// others write `out`. Both have `count` bytes, at most channel.max_bytes(), and may be reused on
// return. Called by all threads of the channel's coop (a thread, warp or block: coop.cuh). All
// threads get the same status; unless it is ok, `out` is undefined.
template <class Coop, int WORLD_SIZE>
KCCL_DEVICE Status broadcast_direct_ll16(Channel<Coop, WORLD_SIZE>& channel, uint8_t* out,
                                         const uint8_t* in, uint32_t count, int root) {
    const bool is_root = channel.comm().rank == root;
    const auto send = [&](uint32_t i, bool are_words) {
        if (!is_root) return;
        const uint64_t payload = load_payload(in, i, count, are_words);
        KCCL_UNROLL
        for (int k = 0; k < kMaxRanks<WORLD_SIZE> - 1; ++k) {
            if (k < channel.world_size() - 1) ll16::push_to(channel, k, i, payload);
        }
    };
    const auto take = [&](uint32_t i, bool is_mine, bool are_words) {
        if (is_root) return true;
        uint64_t payload;
        if (!ll16::await_one(channel, root, i, &payload)) return false;
        if (is_mine) store_payload(out, i, count, payload, are_words);
        return true;
    };
    return ll16::exchange(channel, kKcclBroadcastDirectLl16, Exchange::kCredited,
                          num_payloads<uint8_t>(count), false, send, take);
}

namespace kernels {

template <int WORLD_SIZE>
KCCL_KERNEL void broadcast_direct_ll16(KCCL_KERNEL_PARAM(KcclCall) parameter) {
    const KcclCall& call = platform::first_parameter(parameter);
    Channel<Block, WORLD_SIZE> channel(call, 1);
    const Slice slice = call_slice<uint8_t>(call);
    prefetch_slice<uint8_t>(call, slice);
    in_rounds<uint8_t>(channel, call, slice, call.comm.layout.packet_bytes,
                       [&](uint8_t* out, const uint8_t* in, uint32_t count) {
                           return kccl::broadcast_direct_ll16(channel, out, in, count, call.peer);
                       });
}

}  // namespace kernels
}  // namespace kccl
