// The scrub: resets a channel's packets and flag words before old ones could look valid again
// because the epoch has wrapped.
//
// The epoch, a channel's count of calls, is a number of 32 bits that wraps; its period is 2^32. A
// packet is valid if its flag equals the epoch. So one that nobody overwrites looks valid again
// after a whole period. A flag word is valid if it holds the epoch or a later one. Which of two
// epochs is later can be told only if they are at most half a period apart (has_reached()). So a
// flag word that nobody writes looks valid again after little more than half a period.
//
// So each rank scrubs twice a period, when it enters the calls of epochs 0 and 2^31. It sets the
// packets and flag words of the channel in its own scratch to the previous epoch. Then it waits in
// a barrier, so that no peer pushes data of the new call into a slot that is yet to be reset. The
// barrier's own words need no reset: each scrub writes them.
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
