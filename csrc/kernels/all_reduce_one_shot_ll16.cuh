// all_reduce, one_shot, ll16, push: for messages so small that latency is everything.
//
//     rank r:  in --pack--> slot[r] in every peer's window    (world_size - 1) * 2 * n bytes out
//              slot[0..] of its own window --reduce--> out        polls its own memory only
//
// No barrier: a packet is its own signal. The next call uses the other parity's slots; why the call
// after that may overwrite these is told in channel.cuh. Messages longer than a slot go in rounds,
// each a call of its own on the channel.
#pragma once

#include "../include/kccl/channel.cuh"
#include "../include/kccl/packet.cuh"
#include "../include/kccl/reduce.cuh"

namespace kccl {

// Called by all threads of the coop. out and in hold call.count elements of T, are the same or do
// not overlap, and may be reused on return. All threads get the same status; unless it is ok, `out`
// is undefined. A thread may read only the results it stored itself until the coop syncs.
//
// WORLD_SIZE: the communicator's, so that loops over peers unroll; 0: whatever it is.
template <class T, class Op, int WORLD_SIZE, class Coop>
KCCL_DEVICE Status all_reduce_one_shot_ll16(Coop coop, const Call& call) {
    const DeviceComm& comm = call.comm;
    const int world_size = WORLD_SIZE > 0 ? WORLD_SIZE : comm.world_size;
    const uint64_t round = comm.layout.packet_bytes / sizeof(T);
    Channel channel(call);
    for (uint64_t begin = 0; begin < call.count; begin += round) {
        const T* in = reinterpret_cast<const T*>(call.input) + begin;
        T* out = reinterpret_cast<T*>(call.output) + begin;
        const uint64_t count = call.count - begin < round ? call.count - begin : round;
        const uint64_t num_packets = num_payloads<T>(count);

        const Status entered = channel.next(coop, Exchange::kPairwise);
        if (entered != kKcclOk) return entered;
        const uint32_t epoch = channel.epoch();
        mem::Packet* inbox[kKcclMaxWorldSize];
        mem::Packet* outbox[kKcclMaxWorldSize];
        for (int peer = 0; peer < world_size; ++peer) {
            inbox[peer] = packet_slot(comm, comm.rank, call.channel, channel.parity(), peer);
            outbox[peer] = packet_slot(comm, peer, call.channel, channel.parity(), comm.rank);
        }

        for (uint64_t i = coop.index(); i < num_packets; i += coop.size()) {
            const mem::Packet packet = ll16::pack(load_payload(in, i, count), epoch);
            for (int peer = 0; peer < world_size; ++peer) {
                if (peer != comm.rank) mem::store_packet(outbox[peer] + i, packet);
            }
        }

        bool failed = false;
        for (uint64_t first = 0; first < num_packets && !failed; first += coop.size()) {
            const uint64_t i = first + coop.index();
            const bool active = i < num_packets;
            uint64_t payloads[kKcclMaxWorldSize];
            uint32_t missing;
            uint32_t late_seen;
            Wait wait(call, epoch);
            // All peers' packets are loaded before any is checked: their latencies overlap.
            do {
                mem::Packet packets[kKcclMaxWorldSize] = {};
                for (int peer = 0; peer < world_size; ++peer) {
                    if (active && peer != comm.rank)
                        packets[peer] = mem::load_packet(inbox[peer] + i);
                }
                missing = 0;
                late_seen = 0;
                for (int peer = 0; peer < world_size; ++peer) {
                    if (!active || peer == comm.rank) continue;
                    payloads[peer] = ll16::unpack(packets[peer]);
                    if (ll16::is_valid(packets[peer], epoch)) continue;
                    if (missing == 0) late_seen = ll16::stale_flag(packets[peer], epoch);
                    missing |= 1u << peer;
                }
            } while (wait.again(missing, late_seen));
            failed = wait.failed();
            if (failed || !active) continue;
            payloads[comm.rank] = load_payload(in, i, count);
            store_payload(out, i, count, reduce_payloads<T, Op>(payloads, world_size));
        }
        if (coop.any(failed)) return status_of(comm);
    }
    return kKcclOk;
}

namespace kernels {

template <class T, class Op>
KCCL_KERNEL void all_reduce_one_shot_ll16(KCCL_KERNEL_PARAM(KcclCall) call) {
    // Two ranks are where a CPU's time goes into instructions rather than into waiting.
    if (call.comm.world_size == 2) {
        kccl::all_reduce_one_shot_ll16<T, Op, 2>(block(), call);
    } else {
        kccl::all_reduce_one_shot_ll16<T, Op, 0>(block(), call);
    }
}

}  // namespace kernels
}  // namespace kccl
