// Sentinel words: 8 bytes of floats that are their own signal, two in a packet of 16 bytes.
//
// Before a slot is used it is armed: each of its words holds the sentinel, one pattern of NaN. A
// word that holds anything else has arrived. Words are single-copy atomic, and the receiver tests
// each of them. So the data carries no flags and needs no order.
//
// A word must be armed again before its next use. Call c of a channel's sentinel calls uses slot c
// % 4. After its own pushes it re-arms the words that call c-1 used in this rank's own window,
// which nobody polls any more. All other words of that slot are still armed. The next writes to
// them are the peers' pushes of call c+3. These come after the re-arming:
//   - In call c every thread re-arms its share, then a sync ends the call, and in call c+1 every
//     thread fences before it pushes. So its pushes come after the re-arming by all threads. The
//     fence orders packets only, so fence_packets() is enough. It waits little, because the words
//     were re-armed a call ago.
//   - A peer leaves call c+1 only when it has polled a word of this rank, because every sentinel
//     call is pairwise, with at least one word from every rank to every other.
//   - The peer's fences of call c+2 come after those polls, because the sync that ends a call
//     (channel.cuh) lies between. Its pushes of call c+3 come after the fences.
// So a rank may be one call ahead of another and never overtakes a re-arming. The lengths of the
// calls do not matter, nor which thread polls which word. Other calls on the channel in between
// only add order.
//
// A call that the host launches needs no fence before its first round: the kernel before has ended
// (Channel::is_ordered).
//
// Three slots would be enough, because each thread polls a word of every rank and fences itself.
// There are four because the slot is a counter modulo the number of slots, and the counter wraps at
// 2^32, which 3 does not divide.
#pragma once

#include "channel.cuh"

namespace kccl::sentinel {

// The sentinel: its bits are NaN in every float type of 1, 2, 4 and 8 bytes.
constexpr uint64_t kArmed = ~uint64_t{0};

// The payloads of a packet: each half is one word.
constexpr uint32_t kPayloads = 2;

// The most threads of a block. With more, AMD's compiler has too few registers for all ranks'
// packets.
constexpr int kMostThreads = 512;

static_assert((kKcclNumSentinelSlots & (kKcclNumSentinelSlots - 1)) == 0,
              "slots take turns by a counter that wraps at 2^32");

// Returns the number of packets that carry num_payloads payloads.
KCCL_DEVICE uint32_t num_packets(uint32_t num_payloads) {
    return (num_payloads + kPayloads - 1) / kPayloads;
}

// Returns a payload in a form that may be sent. If the payload equals the sentinel, all its
// elements are NaN. Then the payload that is returned also has NaN in each element, but one of them
// has another sign bit: to a reduction all NaNs are equal.
KCCL_DEVICE uint64_t disarmed(uint64_t payload) {
    return payload == kArmed ? payload >> 1 : payload;
}

KCCL_DEVICE mem::Packet pack(const uint64_t (&payloads)[kPayloads]) {
    return {{disarmed(payloads[0]), disarmed(payloads[1])}};
}

KCCL_DEVICE bool is_valid(mem::Packet packet) {
    return packet.half[0] != kArmed && packet.half[1] != kArmed;
}

// This call's slots, which it pushes to and polls, and the slots of the call before, which it
// re-arms. All threads of the coop make such an object when they have entered the call, before they
// push anything.
template <class Coop, int WORLD_SIZE>
class Slots {
  public:
    KCCL_DEVICE explicit Slots(Channel<Coop, WORLD_SIZE>& channel)
        : channel_(channel),
          calls_(channel.state().sentinel_calls),
          stale_packets_(channel.state().sentinel_packets),
          outbox_(slot(calls_, channel.comm().rank)),
          inbox_(at(channel.comm().rank, slot(calls_, 0))),
          slot_packets_(
              static_cast<uint32_t>(channel.comm().layout.packet_bytes / sizeof(mem::Packet))),
          to_stale_((calls_ % kNumSlots == 0 ? kNumSlots - 1 : -1) * channel.world_size() *
                    static_cast<int32_t>(slot_packets_)) {
        if (!channel.is_ordered()) mem::fence_packets();
    }

    // Pushes packet i of this call to receiver(k) of the channel. A call pushes each packet once.
    KCCL_DEVICE void push_to(int k, uint32_t i, mem::Packet packet) const {
        mem::store_packet(at(channel_.receiver(k), outbox_) + i, packet);
    }

    // Pushes packet i to every rank, this one last. A first loop computes the addresses; the
    // comment on outbox_ says why.
    KCCL_DEVICE void push(uint32_t i, mem::Packet packet) const {
        mem::Packet* outbox[kMaxRanks<WORLD_SIZE>];
        KCCL_UNROLL
        for (int k = 0; k < kMaxRanks<WORLD_SIZE>; ++k) {
            if (k < channel_.world_size()) outbox[k] = at(channel_.receiver(k), outbox_) + i;
        }
        KCCL_UNROLL
        for (int k = 0; k < kMaxRanks<WORLD_SIZE>; ++k) {
            if (k < channel_.world_size()) mem::store_packet(outbox[k], packet);
        }
    }

    // Re-arms the words that the call before used, and records that this call uses num_packets from
    // each source. Called once a call by all threads of the coop (a thread, warp or block:
    // coop.cuh), between their pushes and their polls.
    KCCL_DEVICE void rearm(uint32_t num_packets) {
        const uint32_t size = channel_.num_threads();
        mem::Packet* const stale = inbox_ + to_stale_;
        for (uint32_t i = channel_.thread(); i < stale_packets_; i += size) {
            KCCL_UNROLL
            for (int source = 0; source < kMaxRanks<WORLD_SIZE>; ++source) {
                if (source >= channel_.world_size()) break;
                mem::store_packet(stale + (source * slot_packets_ + i),
                                  mem::Packet{{kArmed, kArmed}});
            }
        }
        channel_.state().sentinel_calls = calls_ + 1;
        channel_.state().sentinel_packets = num_packets;
    }

    // Waits for packet i of every rank; payloads[source] gets what `source` pushed. Returns false
    // if the wait failed. Called by all threads of a warp, each with its own i.
    KCCL_DEVICE bool await_all(uint32_t i,
                               uint64_t (&payloads)[kMaxRanks<WORLD_SIZE>][kPayloads]) const {
        const int world_size = channel_.world_size();
        const mem::Packet* inbox[kMaxRanks<WORLD_SIZE>];
        KCCL_UNROLL
        for (int source = 0; source < kMaxRanks<WORLD_SIZE>; ++source) {
            if (source < world_size) inbox[source] = inbox_ + source * slot_packets_;
        }
        mem::Packet packets[kMaxRanks<WORLD_SIZE>];
        // Loads all packets before it checks any, so that the load latencies overlap.
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
            // Words carry no epoch, so the record names the epoch of the call before, in which a
            // missing rank took part.
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
    static constexpr int32_t kNumSlots = kKcclNumSentinelSlots;

    KCCL_DEVICE uint64_t slot(uint32_t calls, int source) const {
        return sentinel_slot(channel_.comm(), channel_.index(), calls % kKcclNumSentinelSlots,
                             source);
    }
    KCCL_DEVICE mem::Packet* at(int rank, uint64_t slot) const {
        return scratch_at<mem::Packet>(channel_.comm(), rank, slot);
    }

    Channel<Coop, WORLD_SIZE>& channel_;
    const uint32_t calls_;
    const uint32_t stale_packets_;
    // The members below are computed before the first push. AMD's compiler loads the DeviceComm
    // again behind each store that others see, and a load behind a push may wait for that push.
    const uint64_t outbox_;        // where this rank pushes: an offset in each receiver's scratch
    mem::Packet* const inbox_;     // where rank 0 pushes to this rank in this call
    const uint32_t slot_packets_;  // packets from the slot of one source to that of the next
    const int32_t to_stale_;       // packets from inbox_ to the inbox_ of the call before
};

}  // namespace kccl::sentinel
