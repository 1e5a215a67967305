// all_reduce, two_shot, sentinel, push: for floats, and messages of medium length, whose time
// depends on both the latency and the links' bandwidth. Rank r owns chunk r of the message, or of
// each block's slice of it.
//
//     reduce-scatter   chunk p of in --> slot[r] of peer p
//                      slot[0..] of its own window --reduce--> result
//     all-gather       result --> slot[r] of every rank, behind the chunk
//                      slot[0..] of its own window --> out
//
//     traffic out per rank: 2 * (world_size - 1) / world_size * n bytes
//
// n is the length of `in` in bytes. There is no barrier between the two phases: a word that is not
// the sentinel has arrived, and a thread that has reduced a packet sends it on. All chunks are
// equally long, and all are sent, even those at the end that hold no elements. So every rank sends
// words to every other, as sentinel.cuh demands. A slice that is longer than the slots is sent in
// rounds, each a call of its own on the channel.
#pragma once

#include "../payload.cuh"
#include "../reduce.cuh"
#include "../sentinel.cuh"

namespace kccl {

// Returns the most bytes of a round. A slot must have room for a chunk and a result.
KCCL_DEVICE uint64_t two_shot_sentinel_bytes(const DeviceComm& comm) {
    constexpr uint64_t kPacketBytes = sizeof(mem::Packet);
    return comm.layout.packet_bytes / (2 * kPacketBytes) * kPacketBytes * comm.world_size;
}

// Sets every rank's `out` to the reduction of all ranks' `in`, `count` elements of T, at most
// two_shot_sentinel_bytes() bytes. All else is as in all_reduce_one_shot_sentinel().
template <class T, class Op, class Coop, int WORLD_SIZE>
KCCL_DEVICE Status all_reduce_two_shot_sentinel(Channel<Coop, WORLD_SIZE>& channel, T* out,
                                                const T* in, uint32_t count, const Op& op = Op{}) {
    static_assert(kHasNan<T> || Op::kReduces, "the type has no pattern to spare");
    constexpr uint32_t kPayloads = sentinel::kPayloads;
    const int world_size = channel.world_size();
    const uint32_t num_packets = sentinel::num_packets(num_payloads<T>(count));
    const uint32_t chunk = (num_packets + world_size - 1) / world_size;
    const uint32_t thread = channel.thread();
    const uint32_t size = channel.num_threads();
    if (!channel.enter(kKcclAllReduceTwoShotSentinel)) return channel.leave(true);
    sentinel::Slots slots(channel);
    for (uint32_t i = thread; i < chunk; i += size) {
        KCCL_UNROLL
        for (int k = 0; k < kMaxRanks<WORLD_SIZE>; ++k) {
            if (k >= world_size) break;
            uint64_t payloads[kPayloads];
            load_payloads(payloads, in, kPayloads * (channel.receiver(k) * chunk + i), count);
            slots.push_to(k, i, sentinel::pack(payloads));
        }
    }
    slots.rearm(2 * chunk);

    bool failed = false;
    // A thread without a packet of its own polls the last packet, because its whole warp must poll.
    for (uint32_t first = 0; first < chunk && !failed; first += size) {
        const uint32_t mine = first + thread;
        uint64_t payloads[kMaxRanks<WORLD_SIZE>][kPayloads];
        failed = !slots.await_all(mine < chunk ? mine : chunk - 1, payloads);
        if (failed || mine >= chunk) continue;
        uint64_t results[kPayloads];
        reduce_packets<T, Op>(results, payloads, world_size, op);
        slots.push(chunk + mine, sentinel::pack(results));
    }
    channel.sent();
    for (uint32_t first = 0; first < chunk && !failed; first += size) {
        const uint32_t mine = first + thread;
        uint64_t results[kMaxRanks<WORLD_SIZE>][kPayloads];
        failed = !slots.await_all(chunk + (mine < chunk ? mine : chunk - 1), results);
        if (failed || mine >= chunk) continue;
        KCCL_UNROLL
        for (int source = 0; source < kMaxRanks<WORLD_SIZE>; ++source) {
            if (source >= world_size) break;
            store_payloads(out, kPayloads * (source * chunk + mine), count, results[source]);
        }
    }
    return channel.leave(failed);
}

namespace kernels {

template <class T, class Op, int WORLD_SIZE>
KCCL_KERNEL_OF(sentinel::kMostThreads)
void all_reduce_two_shot_sentinel(KCCL_KERNEL_PARAM(KcclCall) parameter) {
    const KcclCall& call = platform::first_parameter(parameter);
    Channel<Block, WORLD_SIZE> channel(call, sizeof(T));
    const Slice slice = call_slice<T>(call);
    const Op op = operator_of<Op>(call);
    // EXPECTS_END is false, because this kernel would have too few registers with expect_end().
    in_rounds<T, false>(channel, call, slice, two_shot_sentinel_bytes(call.comm),
                        [&, op](T* out, const T* in, uint32_t count) {
                            return kccl::all_reduce_two_shot_sentinel<T, Op>(channel, out, in,
                                                                             count, op);
                        });
}

}  // namespace kernels
}  // namespace kccl
