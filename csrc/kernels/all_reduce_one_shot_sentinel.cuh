// all_reduce, one_shot, sentinel, push: floats without flags, so half the bytes of ll16.
//
//     rank r:  in --> slot[r] in every rank's window          (world_size - 1) * n bytes out
//              what the call before used --> armed again      world_size * n bytes, local
//              slot[0..] of its own window --reduce--> out    polls its own memory only
//
// No barrier: a word that is not the sentinel has arrived. Why a slot is armed before a peer writes
// it again is told in sentinel.cuh. Messages longer than a slot go in rounds, each a call of its own
// on the channel.
#pragma once

#include "../include/kccl/payload.cuh"
#include "../include/kccl/reduce.cuh"
#include "../include/kccl/sentinel.cuh"

namespace kccl {

// Contract as all_reduce_one_shot_ll16, for floats.
template <class T, class Op, class Coop, int WORLD_SIZE>
KCCL_DEVICE Status all_reduce_one_shot_sentinel(Channel<Coop, WORLD_SIZE>& channel, T* out,
                                                const T* in, uint32_t count) {
    static_assert(!kIsInteger<T>, "an integer has no pattern to spare");
    constexpr int kRanks = kMaxRanks<WORLD_SIZE>;
    const DeviceComm& comm = channel.comm();
    const Coop coop = channel.coop();
    const int world_size = channel.world_size();
    const uint32_t num_packets = sentinel::num_packets(num_payloads<T>(count));
    const Status entered = channel.next(kKcclAllReduceOneShotSentinel, Exchange::kPairwise);
    if (entered != kKcclOk) return entered;
    sentinel::Slots slots(channel);
    for (uint32_t i = coop.index(); i < num_packets; i += coop.size()) {
        uint64_t payloads[sentinel::kPayloads];
        load_payloads(payloads, in, 2 * i, count);
        const mem::Packet packet = sentinel::pack(payloads);
        KCCL_UNROLL
        for (int k = 0; k < kRanks; ++k) {
            if (k >= world_size) break;
            const int peer = (comm.rank + 1 + k) % world_size;
            mem::store_packet(slots.of(peer, comm.rank) + i, packet);
        }
    }
    slots.rearm(num_packets);

    bool failed = false;
    for (uint32_t first = 0; first < num_packets && !failed; first += coop.size()) {
        // Who has no packet polls the last one with its warp.
        const uint32_t mine = first + coop.index();
        const uint32_t i = mine < num_packets ? mine : num_packets - 1;
        mem::Packet packets[kRanks];
        // All packets are loaded before any is checked: their latencies overlap.
        const auto poll = [&] {
            KCCL_UNROLL
            for (int source = 0; source < kRanks; ++source) {
                if (source >= world_size) break;
                packets[source] = mem::load_packet(slots.of(comm.rank, source) + i);
            }
            bool are_valid = true;
            KCCL_UNROLL
            for (int source = 0; source < kRanks; ++source) {
                if (source >= world_size) break;
                are_valid &= sentinel::is_valid(packets[source]);
            }
            return are_valid;
        };
        const auto missing = [&] {
            // Words carry no epoch. Whoever is missing has been seen in the call before.
            Missing late = {0, channel.epoch() - comm.epoch_step};
            for (int source = 0; source < kRanks; ++source) {
                if (source >= world_size || sentinel::is_valid(packets[source])) continue;
                late.ranks |= 1u << source;
            }
            return late;
        };
        failed = !wait_until(comm, channel.awaited(), poll, missing);
        if (failed || i != mine) continue;
        uint64_t results[sentinel::kPayloads];
        for (uint32_t k = 0; k < sentinel::kPayloads; ++k) {
            results[k] = reduce_payloads<T, Op, sentinel::kPayloads, kRanks>(&packets[0].half[k],
                                                                             world_size);
        }
        store_payloads(out, 2 * i, count, results);
    }
    return channel.leave(failed);
}

namespace kernels {

template <class T, class Op, int WORLD_SIZE>
KCCL_KERNEL void all_reduce_one_shot_sentinel(KCCL_KERNEL_PARAM(KcclCall) call) {
    Channel<Block, WORLD_SIZE> channel(block(), call.comm, call.channel, platform::block_in_grid(),
                                       false);
    const Slice slice = call_slice<T>(call);
    prefetch_slice<T>(call, slice);
    in_rounds<T>(call, slice, call.comm.layout.packet_bytes,
                 [&](T* out, const T* in, uint32_t count) {
                     return kccl::all_reduce_one_shot_sentinel<T, Op>(channel, out, in, count);
                 });
}

}  // namespace kernels
}  // namespace kccl
