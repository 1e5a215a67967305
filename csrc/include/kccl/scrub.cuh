// The scrub: resets a channel's packets and flag words before epochs wrap, so that none of them
// looks as if it came from a later call.
//
// The epoch, a channel's count of calls, wraps after a period. A packet is valid if its flag equals
// the epoch, and a flag word if it is not behind the epoch. So a word that nobody writes for a
// whole period would look valid again. Twice a period each rank resets the words of the channel in
// its own scratch to the epoch before this one, and a barrier keeps the peers from pushing before
// that. The barrier's own words are not reset: the scrub itself writes them twice a period.
#pragma once

#include "barrier.cuh"
#include "payload.cuh"

namespace kccl {

// Scrubs a channel, before the call that is `awaited`. Called by all threads of the coop (a thread,
// warp or block: coop.cuh) when they enter that call. `index`: the scratch channel
// (Channel::index()).
template <class Coop>
KCCL_DEVICE_COLD Status scrub(Coop coop, const DeviceComm& comm, int index, Awaited awaited) {
    const uint32_t epoch = awaited.wanted;
    const uint32_t past = epoch - comm.epoch_step;
    const uint64_t stale = static_cast<uint64_t>(past) << 32;
    for (int source = 0; source < comm.world_size; ++source) {
        for (uint32_t parity = 0; parity < 2; ++parity) {
            mem::Packet* slot = packet_slot(comm, comm.rank, index, parity, source);
            for (uint64_t i = coop.index(); i < comm.layout.packet_bytes / kPayloadBytes;
                 i += coop.size()) {
                mem::store_packet(slot + i, mem::Packet{{stale, stale}});
            }
        }
        if (!leads(coop)) continue;
        for (int flag = kKcclFlagCredit; flag < kKcclNumFlags; ++flag) {
            mem::store<mem::Order::kRelaxed, mem::Scope::kSystem>(
                flag_word(comm, comm.rank, index, static_cast<KcclFlag>(flag), source), past);
        }
    }
    arrive<mem::Order::kRelease>(coop, comm, index, kKcclFlagBarrier, epoch);
    return await<mem::Order::kAcquire>(coop, comm, index, kKcclFlagBarrier, awaited, 0,
                                       comm.world_size);
}

}  // namespace kccl
