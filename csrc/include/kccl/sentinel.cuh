// Sentinel words: 8 bytes of floats that are their own signal, two in a packet of 16 bytes. A slot is
// armed with the sentinel, a pattern of NaN; a word that reads otherwise has arrived. Words are
// single-copy atomic and each is tested, so nothing is added to the data and nothing orders it.
//
// A word must be armed again before its next use. Of a channel's sentinel calls, call c uses slot
// c % 4. When its own pushes are out it re-arms the words that call c-1 used, in this rank's own
// window, where its polls ended with call c-1; all other words of that slot are still armed. The
// next to write them are the peers' pushes of call c+3. These come after the re-arming:
//   - in call c every thread re-arms its share, the coop syncs, and every thread fences: whatever a
//     thread publishes later, in call c+1 at the earliest, comes after the re-arming by all;
//   - a peer leaves call c+1 only when it has polled a word of this rank, because every sentinel
//     call is pairwise and has at least one word;
//   - the peer's fences of call c+2 come after those polls, and a coop sync (channel.cuh) separates
//     them from its pushes of call c+3.
// So a rank may be one call ahead of another and never overtakes a re-arming, and neither the
// lengths of the calls nor which thread owned which word matters. Calls of other kinds that come
// between on the channel only add order.
//
// Why four slots and not three: a fence behind the push hides behind the wire, but what a peer
// learns in call c+1 orders its pushes only after its next fence, that of call c+2. With the fence
// before the push, where nothing hides it, three would do.
#pragma once

#include "channel.cuh"

namespace kccl::sentinel {

// NaN in every float type of 2, 4 and 8 bytes.
constexpr uint64_t kArmed = ~uint64_t{0};

constexpr uint32_t kPayloads = 2;

static_assert((kKcclNumSentinelSlots & (kKcclNumSentinelSlots - 1)) == 0,
              "slots take turns by a counter that wraps at 2^32");

// Packets that carry so many payloads.
KCCL_DEVICE uint32_t num_packets(uint32_t num_payloads) {
    return (num_payloads + kPayloads - 1) / kPayloads;
}

// A payload as it may be sent. One that looks like the sentinel has NaN in each element, and so has
// the one that is sent for it; which NaN it was makes no difference to a reduction.
KCCL_DEVICE uint64_t disarmed(uint64_t payload) {
    return payload == kArmed ? payload - 1 : payload;
}

KCCL_DEVICE mem::Packet pack(const uint64_t (&payloads)[kPayloads]) {
    return {{disarmed(payloads[0]), disarmed(payloads[1])}};
}

KCCL_DEVICE bool is_valid(mem::Packet packet) {
    return packet.half[0] != kArmed && packet.half[1] != kArmed;
}

// The slots of one call and of the one before. Made after Channel::next().
template <class Coop, int WORLD_SIZE>
class Slots {
  public:
    KCCL_DEVICE explicit Slots(Channel<Coop, WORLD_SIZE>& channel)
        : channel_(channel),
          calls_(channel.state().sentinel_calls),
          stale_packets_(channel.state().sentinel_packets) {}

    // The packets of this call that `source` pushes into `rank`'s window.
    KCCL_DEVICE mem::Packet* of(int rank, int source) const { return at(calls_, rank, source); }

    // Re-arms what the call before used, and remembers that this one uses num_packets of each
    // source. Called once a call by all threads of the coop, between their pushes and their polls.
    KCCL_DEVICE void rearm(uint32_t num_packets) {
        const Coop coop = channel_.coop();
        for (int source = 0; source < channel_.world_size(); ++source) {
            mem::Packet* stale = at(calls_ - 1, channel_.comm().rank, source);
            for (uint32_t i = coop.index(); i < stale_packets_; i += coop.size()) {
                mem::store_packet(stale + i, mem::Packet{{kArmed, kArmed}});
            }
        }
        coop.sync();
        channel_.state().sentinel_calls = calls_ + 1;
        channel_.state().sentinel_packets = num_packets;
        mem::fence<mem::Order::kAcqRel, mem::Scope::kSystem>();
    }

  private:
    KCCL_DEVICE mem::Packet* at(uint32_t calls, int rank, int source) const {
        return sentinel_slot(channel_.comm(), rank, channel_.index(), calls % kKcclNumSentinelSlots,
                             source);
    }

    Channel<Coop, WORLD_SIZE>& channel_;
    uint32_t calls_;
    uint32_t stale_packets_;
};

}  // namespace kccl::sentinel
