// all_reduce, one_shot, sentinel, push: floats without flags, so half the bytes of ll16.
//
//     rank r:  in --> slot[r] in every peer's window          (world_size - 1) * n bytes out
//              what the call before used --> armed again      (world_size - 1) * n bytes, local
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
template <class T, class Op, int WORLD_SIZE, class Coop>
KCCL_DEVICE Status all_reduce_one_shot_sentinel(Coop coop, const Call& call) {
    static_assert(!kIsInteger<T>, "an integer has no pattern to spare");
    const DeviceComm& comm = call.comm;
    const int world_size = WORLD_SIZE > 0 ? WORLD_SIZE : comm.world_size;
    const uint64_t round = comm.layout.packet_bytes / sizeof(T);
    Channel channel(call);
    for (uint64_t begin = 0; begin < call.count; begin += round) {
        const T* in = reinterpret_cast<const T*>(call.input) + begin;
        T* out = reinterpret_cast<T*>(call.output) + begin;
        const uint64_t count = call.count - begin < round ? call.count - begin : round;
        const uint64_t num_packets = sentinel::num_packets(num_payloads<T>(count));

        const Status entered = channel.next(coop, Exchange::kPairwise);
        if (entered != kKcclOk) return entered;
        sentinel::Slots slots(call);
        for (uint64_t i = coop.index(); i < num_packets; i += coop.size()) {
            uint64_t payloads[sentinel::kPayloads];
            load_payloads(payloads, in, 2 * i, count);
            const mem::Packet packet = sentinel::pack(payloads);
            for (int peer = 0; peer < world_size; ++peer) {
                if (peer != comm.rank) mem::store_packet(slots.of(peer, comm.rank) + i, packet);
            }
        }
        slots.rearm(coop, num_packets);

        bool failed = false;
        for (uint64_t first = 0; first < num_packets && !failed; first += coop.size()) {
            const uint64_t i = first + coop.index();
            const bool active = i < num_packets;
            mem::Packet packets[kKcclMaxWorldSize] = {};
            uint32_t missing;
            Wait wait(call, channel.epoch());
            // All peers' packets are loaded before any is checked: their latencies overlap.
            do {
                for (int peer = 0; peer < world_size; ++peer) {
                    if (active && peer != comm.rank)
                        packets[peer] = mem::load_packet(slots.of(comm.rank, peer) + i);
                }
                missing = 0;
                for (int peer = 0; peer < world_size; ++peer) {
                    if (!active || peer == comm.rank) continue;
                    if (!sentinel::is_valid(packets[peer])) missing |= 1u << peer;
                }
                // Words carry no epoch. Whoever is missing has been seen in the call before.
            } while (wait.again(missing, channel.epoch() - comm.epoch_step));
            failed = wait.failed();
            if (failed || !active) continue;
            load_payloads(packets[comm.rank].half, in, 2 * i, count);
            uint64_t results[sentinel::kPayloads];
            for (uint64_t k = 0; k < sentinel::kPayloads; ++k) {
                results[k] =
                    reduce_payloads<T, Op, sentinel::kPayloads>(&packets[0].half[k], world_size);
            }
            store_payloads(out, 2 * i, count, results);
        }
        if (coop.any(failed)) return status_of(comm);
    }
    return kKcclOk;
}

namespace kernels {

template <class T, class Op>
KCCL_KERNEL void all_reduce_one_shot_sentinel(KCCL_KERNEL_PARAM(KcclCall) call) {
    // As all_reduce_one_shot_ll16.
    if (call.comm.world_size == 2) {
        kccl::all_reduce_one_shot_sentinel<T, Op, 2>(block(), call);
    } else {
        kccl::all_reduce_one_shot_sentinel<T, Op, 0>(block(), call);
    }
}

}  // namespace kernels
}  // namespace kccl
