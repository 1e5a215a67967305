// broadcast, direct, ll16, push: the root writes packets into every peer's window.
//
//     root:    in --pack--> slot[root] in every peer's window   (world_size - 1) * 2 * n bytes out
//     others:  slot[root] of their own window --> out
//
// Payloads are bytes, so every bit pattern arrives unchanged. The root waits for nobody: the call
// is credited, and channel.cuh keeps it from running more than one call ahead.
#pragma once

#include "../include/kccl/channel.cuh"
#include "../include/kccl/packet.cuh"

namespace kccl {

// Called by all threads of the coop. call.count is in bytes; call.peer is the root. `input` is read
// on the root only, `out` written on the others only; both may be reused on return.
template <class Coop>
KCCL_DEVICE Status broadcast_direct_ll16(Coop coop, const Call& call) {
    const DeviceComm& comm = call.comm;
    const int root = call.peer;
    const uint64_t round = comm.layout.packet_bytes;
    Channel channel(call);
    for (uint64_t begin = 0; begin < call.count; begin += round) {
        const auto* in = reinterpret_cast<const uint8_t*>(call.input) + begin;
        auto* out = reinterpret_cast<uint8_t*>(call.output) + begin;
        const uint64_t count = call.count - begin < round ? call.count - begin : round;
        const uint64_t num_packets = num_payloads<uint8_t>(count);

        const Status entered = channel.next(coop, Exchange::kCredited);
        if (entered != kKcclOk) return entered;
        const uint32_t epoch = channel.epoch();

        if (comm.rank == root) {
            for (uint64_t i = coop.index(); i < num_packets; i += coop.size()) {
                const mem::Packet packet = ll16::pack(load_payload(in, i, count), epoch);
                for (int peer = 0; peer < comm.world_size; ++peer) {
                    if (peer == root) continue;
                    mem::store_packet(
                        packet_slot(comm, peer, call.channel, channel.parity(), root) + i, packet);
                }
            }
            continue;
        }

        const mem::Packet* inbox =
            packet_slot(comm, comm.rank, call.channel, channel.parity(), root);
        bool failed = false;
        for (uint64_t first = 0; first < num_packets && !failed; first += coop.size()) {
            const uint64_t i = first + coop.index();
            const bool active = i < num_packets;
            mem::Packet packet = {};
            uint32_t missing;
            Wait wait(call, epoch);
            do {
                if (active) packet = mem::load_packet(inbox + i);
                missing = active && !ll16::is_valid(packet, epoch) ? 1u << root : 0;
            } while (wait.again(missing, ll16::stale_flag(packet, epoch)));
            failed = wait.failed();
            if (!failed && active) store_payload(out, i, count, ll16::unpack(packet));
        }
        if (coop.any(failed)) return status_of(comm);
    }
    return kKcclOk;
}

namespace kernels {

KCCL_KERNEL void broadcast_direct_ll16(KCCL_KERNEL_PARAM(KcclCall) call) {
    kccl::broadcast_direct_ll16(block(), call);
}

}  // namespace kernels
}  // namespace kccl
