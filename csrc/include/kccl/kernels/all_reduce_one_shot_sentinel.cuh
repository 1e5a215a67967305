// all_reduce, one_shot, sentinel, push: sends floats without flags, so half as many bytes as ll16.
//
//     rank r:  in --> slot[r] in every rank's window          (world_size - 1) * n bytes out
//              the words of the call before are armed again   world_size * n bytes, local
//              slot[0..] of its own window --reduce--> out    polls its own memory only
//
// n is the length of the message in bytes, and slot[r] has room for the words of rank r in one
// call. To arm a word is to store the sentinel in it, one pattern of NaN. There is no barrier: a
// word that is not the sentinel has arrived. sentinel.cuh says why a slot is armed before a peer
// writes it again. A message that is longer than a slot is sent in rounds, each a call of its own
// on the channel.
#pragma once

#include "../payload.cuh"
#include "../reduce.cuh"
#include "../sentinel.cuh"

namespace kccl {

// Sets every rank's `out` to the reduction of all ranks' `in`, `count` elements of T, at most
// channel.max_bytes() bytes. T has NaN, as floats do. All else is as in all_reduce_one_shot_ll16().
template <class T, class Op, class Coop, int WORLD_SIZE>
KCCL_DEVICE Status all_reduce_one_shot_sentinel(Channel<Coop, WORLD_SIZE>& channel, T* out,
                                                const T* in, uint32_t count, const Op& op = Op{}) {
    static_assert(kHasNan<T> || Op::kReduces, "the type has no pattern to spare");
    const uint32_t num_packets = sentinel::num_packets(num_payloads<T>(count));
    const uint32_t thread = channel.thread();
    const uint32_t size = channel.num_threads();
    // The first elements of `in` are loaded here, so that these loads overlap with those that open
    // the channel.
    uint64_t first_payloads[sentinel::kPayloads] = {};
    if (thread < num_packets) load_payloads(first_payloads, in, 2 * thread, count);
    if (!channel.enter(kKcclAllReduceOneShotSentinel)) return channel.leave(true);
    sentinel::Slots slots(channel);
    if (thread < num_packets) slots.push(thread, sentinel::pack(first_payloads));
    for (uint32_t i = thread + size; i < num_packets; i += size) {
        uint64_t payloads[sentinel::kPayloads];
        load_payloads(payloads, in, 2 * i, count);
        slots.push(i, sentinel::pack(payloads));
    }
    slots.rearm(num_packets);
    channel.sent();
    [[maybe_unused]] const platform::DefaultFloats floats{};

    bool failed = false;
    for (uint32_t first = 0; first < num_packets && !failed; first += size) {
        // A thread without a packet of its own polls the last packet, because its whole warp must
        // poll.
        const uint32_t mine = first + thread;
        const uint32_t i = mine < num_packets ? mine : num_packets - 1;
        uint64_t payloads[kMaxRanks<WORLD_SIZE>][sentinel::kPayloads];
        failed = !slots.await_all(i, payloads);
        if (failed || i != mine) continue;
        uint64_t results[sentinel::kPayloads];
        reduce_packets<T, Op>(results, payloads, channel.world_size(), op);
        store_payloads(out, 2 * i, count, results);
    }
    return channel.leave(failed);
}

namespace kernels {

template <class T, class Op, int WORLD_SIZE>
KCCL_KERNEL_OF(sentinel::kMostThreads)
void all_reduce_one_shot_sentinel(KCCL_KERNEL_PARAM(KcclCall) parameter) {
    const KcclCall& call = platform::first_parameter(parameter);
    Channel<Block, WORLD_SIZE> channel(call, sizeof(T));
    const Slice slice = call_slice<T>(call);
    const Op op = operator_of<Op>(call);
    in_rounds<T>(channel, call, slice, call.comm.layout.packet_bytes,
                 [&, op](T* out, const T* in, uint32_t count) {
                     return kccl::all_reduce_one_shot_sentinel<T, Op>(channel, out, in, count, op);
                 });
}

}  // namespace kernels
}  // namespace kccl
