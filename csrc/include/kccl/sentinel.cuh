// Sentinel words: 8 bytes of floats that are their own signal, two in a packet of 16 bytes. A slot is
// armed with the sentinel, a pattern of NaN; a word that reads otherwise has arrived. Words are
// single-copy atomic and each is tested, so nothing is added to the data and nothing orders it.
//
// A word must be armed again before its next use. Of a channel's sentinel calls, call c uses slot
// c % 4. When its own pushes are out it re-arms the words that call c-1 used, in this rank's own
// window, where its polls ended with call c-1; all other words of that slot are still armed. The
// next to write them are the peers' pushes of call c+3. These come after the re-arming:
//   - in call c every thread re-arms its share, the sync that ends the call follows, and in call c+1
//     every thread fences before it pushes: whatever it publishes comes after the re-arming by all;
//   - a peer leaves call c+1 only when it has polled a word of this rank, because every sentinel
//     call is pairwise and has at least one word of every rank for every other;
//   - the peer's fences of call c+2 come after those polls, for the sync that ends a call
//     (channel.cuh) stands between; its pushes of call c+3 come after that.
// So a rank may be one call ahead of another and never overtakes a re-arming, and neither the
// lengths of the calls nor which thread owned which word matters. Calls of other kinds that come
// between on the channel only add order.
//
// A call that the host launches needs no fence before its first round: the kernel before has ended
// (Channel::is_ordered).
//
// Why four slots, though three would do (each thread polls a word of every rank, and fences itself):
// slots take turns by a counter that wraps.
#pragma once

#include "channel.cuh"

namespace kccl::sentinel {

// NaN in every float type of 2, 4 and 8 bytes.
constexpr uint64_t kArmed = ~uint64_t{0};

constexpr uint32_t kPayloads = 2;

// Of a block: with more, AMD's compiler has too few registers for the packets of all ranks.
constexpr int kMostThreads = 512;

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

// The slots of one call and of the one before. Made by all threads of the coop when they have entered
// the call, before they push anything.
template <class Coop, int WORLD_SIZE>
class Slots {
  public:
    KCCL_DEVICE explicit Slots(Channel<Coop, WORLD_SIZE>& channel)
        : channel_(channel),
          calls_(channel.state().sentinel_calls),
          stale_packets_(channel.state().sentinel_packets) {
        if (!channel.is_ordered()) mem::fence<mem::Order::kAcqRel, mem::Scope::kSystem>();
    }

    // Pushes packet i of this call to receiver(k) of the channel. Once a call.
    KCCL_DEVICE void push_to(int k, uint32_t i, mem::Packet packet) const {
        mem::store_packet(at(calls_, channel_.receiver(k), channel_.comm().rank) + i, packet);
    }

    // Pushes packet i to every rank, this one last.
    KCCL_DEVICE void push(uint32_t i, mem::Packet packet) const {
        KCCL_UNROLL
        for (int k = 0; k < kMaxRanks<WORLD_SIZE>; ++k) {
            if (k < channel_.world_size()) push_to(k, i, packet);
        }
    }

    // Re-arms what the call before used, and remembers that this one uses num_packets of each
    // source. Called once a call by all threads of the coop, between their pushes and their polls.
    KCCL_DEVICE void rearm(uint32_t num_packets) {
        const uint32_t size = channel_.num_threads();
        for (int source = 0; source < channel_.world_size(); ++source) {
            mem::Packet* stale = at(calls_ - 1, channel_.comm().rank, source);
            for (uint32_t i = channel_.thread(); i < stale_packets_; i += size) {
                mem::store_packet(stale + i, mem::Packet{{kArmed, kArmed}});
            }
        }
        channel_.state().sentinel_calls = calls_ + 1;
        channel_.state().sentinel_packets = num_packets;
    }

    // Waits for packet i of every rank; payloads[source] are what `source` pushed. False: the wait
    // failed. Called by all threads of a warp, each with an i of its own.
    KCCL_DEVICE bool await_all(uint32_t i,
                               uint64_t (&payloads)[kMaxRanks<WORLD_SIZE>][kPayloads]) const {
        const int world_size = channel_.world_size();
        const mem::Packet* inbox[kMaxRanks<WORLD_SIZE>];
        KCCL_UNROLL
        for (int source = 0; source < kMaxRanks<WORLD_SIZE>; ++source) {
            if (source < world_size) inbox[source] = at(calls_, channel_.comm().rank, source);
        }
        mem::Packet packets[kMaxRanks<WORLD_SIZE>];
        // All packets are loaded before any is checked: their latencies overlap.
        const auto poll = [&] {
            KCCL_UNROLL
            for (int source = 0; source < kMaxRanks<WORLD_SIZE>; ++source) {
                if (source >= world_size) break;
                packets[source] = mem::load_packet(inbox[source] + i);
            }
            bool are_valid = true;
            KCCL_UNROLL
            for (int source = 0; source < kMaxRanks<WORLD_SIZE>; ++source) {
                if (source >= world_size) break;
                are_valid &= is_valid(packets[source]);
            }
            return are_valid;
        };
        const auto missing = [&] {
            // Words carry no epoch. Whoever is missing has been seen in the call before.
            Missing late = {0, channel_.epoch() - channel_.comm().epoch_step};
            for (int source = 0; source < kMaxRanks<WORLD_SIZE>; ++source) {
                if (source >= world_size || is_valid(packets[source])) continue;
                late.ranks |= 1u << source;
            }
            return late;
        };
        if (!wait_until(channel_.comm(), channel_.awaited(), poll, missing)) return false;
        KCCL_UNROLL
        for (int source = 0; source < kMaxRanks<WORLD_SIZE>; ++source) {
            if (source >= world_size) break;
            for (uint32_t n = 0; n < kPayloads; ++n) payloads[source][n] = packets[source].half[n];
        }
        return true;
    }

  private:
    KCCL_DEVICE mem::Packet* at(uint32_t calls, int rank, int source) const {
        return sentinel_slot(channel_.comm(), rank, channel_.index(), calls % kKcclNumSentinelSlots,
                             source);
    }

    Channel<Coop, WORLD_SIZE>& channel_;
    const uint32_t calls_;
    const uint32_t stale_packets_;
};

}  // namespace kccl::sentinel
