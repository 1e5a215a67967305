// all_to_all in which each part has a length of its own. all_gather, gather and scatter of such
// parts call this kernel too, with some empty parts, or with the same part for every rank.
//
//     rank r:  part p of in --packets, and the rest through the staging--> rank p
//              what rank p has sent --> part p of out
//
// The length of a part may be 0. parts.cuh says how a part is sent. Parts are bytes, so every bit
// pattern arrives unchanged. `out` may be `in` if a rank receives from each rank as many bytes as
// it sends to it: a thread has pushed a payload of `in` before it stores another one in its place,
// and a step of the staging (rounds.cuh) overwrites only the round that the step before has pushed.
#pragma once

#include "../parts.cuh"

namespace kccl {

// Sends a part of `in` to every rank, and stores the parts that it receives in `out`. call.sends
// and call.receives have their lengths in bytes; the parts lie one behind the other in `in` and
// `out`, in rank order. `out` and `in` are the same array, with equal lengths, or do not overlap,
// except that the part that this rank keeps may already lie in its place in `out`. Both may be
// reused on return. Called by all threads of the channel's coop (a thread, warp or block:
// coop.cuh). All threads get the same status; unless it is ok, `out` is undefined.
template <class Coop, int WORLD_SIZE>
KCCL_DEVICE Status all_to_all_parts(Channel<Coop, WORLD_SIZE>& channel, uint8_t* out,
                                    const uint8_t* in, const Call& call, Sharing sharing = {}) {
    PartsCall<Coop, WORLD_SIZE> parts(channel, in, call, sharing);
    const Status entered = parts.template push<1>(kKcclAllToAllParts);
    if (entered != kKcclOk) return entered;
    const int world_size = channel.world_size();
    const int rank = channel.comm().rank;
    const uint32_t thread = channel.thread();
    const uint32_t size = channel.num_threads();
    bool failed = !parts.await_heads();
    for (int source = 0; source < world_size && !failed; ++source) {
        const Slice first = parts.first(call.receives[source]);
        const auto count = static_cast<uint32_t>(first.count);
        const uint32_t num = num_payloads<uint8_t>(count);
        uint8_t* to = out + bytes_before(call.receives, source) + first.begin;
        for (uint32_t turn = 0; turn < num && !failed; turn += size) {
            const bool is_mine = turn + thread < num;
            const uint32_t i = is_mine ? turn + thread : num - 1;
            uint64_t payload;
            failed = !ll16::await_one(channel, source, parts.kHead + i, &payload);
            if (is_mine && !failed) store_payload(to, i, count, payload, false);
        }
    }
    if (channel.leave(failed) != kKcclOk) return channel.status();
    return parts.push_rests(
        kKcclAllToAllParts, [&](const Rounds& rounds, uint32_t round, uint32_t parity) {
            copy_rows<WORLD_SIZE>(thread, size, world_size - 1, [&](int k) {
                const int peer = channel.receiver(k);
                const Slice rest = parts.rest(call.receives[peer], rounds, round);
                return Row{out + bytes_before(call.receives, peer) + rest.begin,
                           parts.staged(rank, parity, peer), static_cast<uint32_t>(rest.count)};
            });
            const Slice own = parts.rest(call.receives[rank], rounds, round);
            uint8_t* to = out + bytes_before(call.receives, rank) + own.begin;
            const uint8_t* from = parts.part_for(rank) + own.begin;
            if (to != from) mem::copy(to, from, own.count, thread, size);
        });
}

namespace kernels {

template <int WORLD_SIZE>
KCCL_KERNEL_OF(kMostPartsThreads)
void all_to_all_parts(KCCL_KERNEL_PARAM(KcclCall) parameter) {
    const KcclCall& call = platform::first_parameter(parameter);
    Channel<Block, WORLD_SIZE> channel(call);
    kccl::all_to_all_parts(channel, output_of<uint8_t>(call), input_of<uint8_t>(call), call,
                           launch_sharing());
}

}  // namespace kernels
}  // namespace kccl
