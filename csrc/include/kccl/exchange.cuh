// How ll16 packets are exchanged in a call on a channel. Each rank pushes packets into its
// receivers' windows and polls its own window only. It pushes packets to itself in the same way, so
// that threads need no special case for them. But in calls whose threads keep their own data in
// registers (PeerPlace), a rank sends itself nothing.
//
// In one call, packet i is pushed to each rank at most once. Any packet may be awaited more than
// once, by any threads of the coop. Every rank pushes at least one packet to every other, or the
// call is credited (channel.cuh).
#pragma once

#include "channel.cuh"
#include "ll16.cuh"

namespace kccl::ll16 {

// Pushes packet i of this rank to channel.receiver(k).
template <class Coop, int WORLD_SIZE>
KCCL_DEVICE void push_to(const Channel<Coop, WORLD_SIZE>& channel, int k, uint32_t i,
                         uint64_t payload) {
    mem::store_packet(channel.outbox(k, i), pack(payload, channel.epoch()));
}

// Pushes packet i to one rank. Loops over all receivers, because on GPUs an index that is known
// only at run time would put the channel's addresses into memory.
template <class Coop, int WORLD_SIZE>
KCCL_DEVICE void push_to_rank(const Channel<Coop, WORLD_SIZE>& channel, int rank, uint32_t i,
                              uint64_t payload) {
    KCCL_UNROLL
    for (int k = 0; k < kMaxRanks<WORLD_SIZE>; ++k) {
        const bool is_rank = k < channel.world_size() && channel.receiver(k) == rank;
        if (is_rank) push_to(channel, k, i, payload);
    }
}

// Pushes packet i to every rank, this one last.
template <class Coop, int WORLD_SIZE>
KCCL_DEVICE void push(const Channel<Coop, WORLD_SIZE>& channel, uint32_t i, uint64_t payload) {
    KCCL_UNROLL
    for (int k = 0; k < kMaxRanks<WORLD_SIZE>; ++k) {
        if (k < channel.world_size()) push_to(channel, k, i, payload);
    }
}

// Computes where a thread's packets lie in a call in which ranks send themselves nothing. At each
// rank the slot for its own packets is then free. With two ranks, a rank pushes the packets that do
// not fit in its slot at the other rank into the free slot there.
struct PeerPlace {
    // first: the number of the thread's first packet, below twice the packets of a slot. The
    // thread's other packets lie in the same slot.
    template <class Coop, int WORLD_SIZE>
    KCCL_DEVICE PeerPlace(const Channel<Coop, WORLD_SIZE>& channel, uint32_t first) : first(first) {
        const auto slot = static_cast<int32_t>(channel.max_bytes() / kPayloadBytes);
        if (channel.world_size() != 2 || first < channel.max_bytes() / kPayloadBytes) return;
        const bool is_first_rank = channel.comm().rank == 0;
        out_move = is_first_rank ? 0 : -2 * slot;
        in_move = is_first_rank ? -2 * slot : 0;
    }

    uint32_t first;
    // The distances, in packets, from the usual slot to the slot that is used: out_move for packets
    // that are pushed, in_move for packets that are awaited.
    int32_t out_move = 0, in_move = 0;
};

// Pushes a packet with `payload` to every other rank, to the position `step` packets behind
// `place`. The receivers wait for it by await_peers().
template <class Coop, int WORLD_SIZE>
KCCL_DEVICE void push_to_peers(const Channel<Coop, WORLD_SIZE>& channel, const PeerPlace& place,
                               uint32_t step, uint64_t payload) {
    KCCL_UNROLL
    for (int k = 0; k < kMaxRanks<WORLD_SIZE> - 1; ++k) {
        if (k >= channel.world_size() - 1) break;
        mem::store_packet(channel.outbox(k, place.first) + place.out_move + step,
                          pack(payload, channel.epoch()));
    }
}

// Waits for packet i of every rank; payloads[source] gets what `source` pushed. Returns false if
// the wait failed. Called by all threads of a warp, each with its own i.
template <class Coop, int WORLD_SIZE>
KCCL_DEVICE bool await_all(const Channel<Coop, WORLD_SIZE>& channel, uint32_t i,
                           uint64_t (&payloads)[kMaxRanks<WORLD_SIZE>]) {
    const int world_size = channel.world_size();
    const uint32_t epoch = channel.epoch();
    const mem::Packet* inbox[kMaxRanks<WORLD_SIZE>];
    KCCL_UNROLL
    for (int source = 0; source < kMaxRanks<WORLD_SIZE>; ++source) {
        if (source < world_size) inbox[source] = channel.inbox(source, i);
    }
    mem::Packet packets[kMaxRanks<WORLD_SIZE>];
    // Loads all packets before it checks any, so that the load latencies overlap.
    const auto poll = [&] {
        KCCL_UNROLL
        for (int source = 0; source < kMaxRanks<WORLD_SIZE>; ++source) {
            if (source >= world_size) break;
            packets[source] = mem::load_packet(inbox[source]);
        }
        bool are_valid = true;
        KCCL_UNROLL
        for (int source = 0; source < kMaxRanks<WORLD_SIZE>; ++source) {
            if (source >= world_size) break;
            are_valid &= is_valid(packets[source], epoch);
        }
        return are_valid;
    };
    const auto missing = [&] {
        Missing late = {0, 0};
        for (int source = 0; source < kMaxRanks<WORLD_SIZE>; ++source) {
            if (source >= world_size || is_valid(packets[source], epoch)) continue;
            if (late.ranks == 0) late.seen = stale_flag(packets[source], epoch);
            late.ranks |= 1u << source;
        }
        return late;
    };
    if (!wait_until(channel.comm(), channel.awaited(), poll, missing)) return false;
    KCCL_UNROLL
    for (int source = 0; source < kMaxRanks<WORLD_SIZE>; ++source) {
        if (source < world_size) payloads[source] = unpack(packets[source]);
    }
    return true;
}

// Waits for N packets of every other rank. They lie `begin`, begin + step and so on packets behind
// `place`. payloads[source] gets what `source` pushed; this rank's own entry is not changed. But if
// WORLD_SIZE is 2, the other rank's packets always go to payloads[1], and the caller keeps its own
// in payloads[0]: a sum of two does not depend on their order. All loads overlap. The result, and
// who must call it, are as in await_all().
template <uint32_t N, class Coop, int WORLD_SIZE>
KCCL_DEVICE bool await_peers(const Channel<Coop, WORLD_SIZE>& channel, const PeerPlace& place,
                             uint32_t begin, uint32_t step,
                             uint64_t (&payloads)[kMaxRanks<WORLD_SIZE>][N]) {
    constexpr bool kPair = WORLD_SIZE == 2;
    constexpr int kSources = kPair ? 1 : kMaxRanks<WORLD_SIZE>;
    const int rank = channel.comm().rank;
    const int num_sources = kPair ? 1 : channel.world_size();
    const auto source_of = [&](int k) { return kPair ? 1 - rank : k; };
    const uint32_t epoch = channel.epoch();
    const mem::Packet* inbox[kSources];
    KCCL_UNROLL
    for (int k = 0; k < kSources; ++k) {
        if (k >= num_sources) break;
        inbox[k] = channel.inbox(source_of(k), place.first) + place.in_move + begin;
    }
    mem::Packet packets[kSources][N];
    const auto are_valid = [&](int k) {
        bool are_all_valid = true;
        KCCL_UNROLL
        for (uint32_t n = 0; n < N; ++n) are_all_valid &= is_valid(packets[k][n], epoch);
        return are_all_valid;
    };
    const auto poll = [&] {
        KCCL_UNROLL
        for (int k = 0; k < kSources; ++k) {
            if (k >= num_sources) break;
            if (source_of(k) == rank) continue;
            KCCL_UNROLL
            for (uint32_t n = 0; n < N; ++n) packets[k][n] = mem::load_packet(inbox[k] + n * step);
        }
        bool are_all_valid = true;
        KCCL_UNROLL
        for (int k = 0; k < kSources; ++k) {
            if (k >= num_sources) break;
            if (source_of(k) != rank) are_all_valid &= are_valid(k);
        }
        return are_all_valid;
    };
    const auto missing = [&] {
        Missing late = {0, 0};
        KCCL_UNROLL
        for (int k = 0; k < kSources; ++k) {
            if (k >= num_sources || source_of(k) == rank || are_valid(k)) continue;
            KCCL_UNROLL
            for (uint32_t n = 0; n < N; ++n) {
                if (late.ranks != 0 || is_valid(packets[k][n], epoch)) continue;
                late.seen = stale_flag(packets[k][n], epoch);
            }
            late.ranks |= 1u << source_of(k);
        }
        return late;
    };
    if (!wait_until(channel.comm(), channel.awaited(), poll, missing)) return false;
    KCCL_UNROLL
    for (int k = 0; k < kSources; ++k) {
        if (k >= num_sources) break;
        if (source_of(k) == rank) continue;
        KCCL_UNROLL
        for (uint32_t n = 0; n < N; ++n) payloads[kPair ? 1 : k][n] = unpack(packets[k][n]);
    }
    return true;
}

// Waits for unit i of every rank: N payloads, which a reduction computes together (payload.cuh).
// The unit of rank `source` goes to units[source * N] and the entries behind it. The result, and
// who must call this function, are as in await_all().
template <uint32_t N, class Coop, int WORLD_SIZE>
KCCL_DEVICE bool await_units(const Channel<Coop, WORLD_SIZE>& channel, uint32_t i,
                             uint64_t (&units)[kMaxRanks<WORLD_SIZE> * N]) {
    constexpr int kRanks = kMaxRanks<WORLD_SIZE>;
    if constexpr (N == 1) {
        return await_all(channel, i, units);
    } else {
        for (uint32_t n = 0; n < N; ++n) {
            uint64_t payloads[kRanks];
            if (!await_all(channel, i * N + n, payloads)) return false;
            KCCL_UNROLL
            for (int source = 0; source < kRanks; ++source) {
                if (source < channel.world_size()) units[source * N + n] = payloads[source];
            }
        }
        return true;
    }
}

// Waits for packet i of rank `source`; *payload gets what that rank pushed. The result, and who
// must call this function, are as in await_all().
template <class Coop, int WORLD_SIZE>
KCCL_DEVICE bool await_one(const Channel<Coop, WORLD_SIZE>& channel, int source, uint32_t i,
                           uint64_t* payload) {
    const uint32_t epoch = channel.epoch();
    const mem::Packet* inbox = channel.inbox(source, i);
    mem::Packet packet;
    const auto poll = [&] {
        packet = mem::load_packet(inbox);
        return is_valid(packet, epoch);
    };
    const auto missing = [&] {
        const uint32_t late = is_valid(packet, epoch) ? 0 : 1u << source;
        return Missing{late, stale_flag(packet, epoch)};
    };
    if (!wait_until(channel.comm(), channel.awaited(), poll, missing)) return false;
    *payload = unpack(packet);
    return true;
}

// The Floats of an exchange() whose take() does not compute with floats.
struct NoFloats {};

// Makes a whole call: sends packet i to every rank and takes packet i of every rank, for all i <
// num_packets, which is at least 1. Called by all threads of the channel's coop (a thread, warp or
// block: coop.cuh).
//
// send(i, are_words): pushes packet i. take(i, is_mine, are_words) -> bool: waits for packet i, and
// uses it if is_mine. Returns false if the wait failed. A thread without a packet of its own polls
// the last packet, because its whole warp must poll. are_words: the caller knows that all payloads
// are whole and aligned words. Floats: platform::DefaultFloats if take() computes with floats.
//
// Calls of at most one packet a thread, all whole words, take a path of their own without a loop,
// behind the `if`. So little code runs between the arrival of a call's last packet and the push of
// the next call's first.
template <class Floats = NoFloats, class Coop, int WORLD_SIZE, class Send, class Take>
KCCL_DEVICE Status exchange(Channel<Coop, WORLD_SIZE>& channel, uint32_t kernel, Exchange kind,
                            uint32_t num_packets, bool are_words, Send send, Take take) {
    const uint32_t size = channel.num_threads();
    const uint32_t first = channel.thread();
    const uint32_t last = num_packets - 1;
    if (kind != Exchange::kPairwise || !are_words || num_packets > size ||
        !channel.is_next_plain()) {
        const Status entered = channel.next(kernel, kind);
        if (entered != kKcclOk) return entered;
        for (uint32_t i = first; i <= last; i += size) send(i, false);
        channel.sent();
        [[maybe_unused]] const Floats floats{};
        bool failed = false;
        for (uint32_t turn = 0; turn <= last && !failed; turn += size) {
            const bool is_mine = turn + first <= last;
            failed = !take(is_mine ? turn + first : last, is_mine, false);
        }
        return channel.leave(failed);
    }
    const bool is_mine = first <= last;
    const bool is_usable = channel.is_usable();
    channel.next_plain(kernel);
    if (is_mine && is_usable) send(first, true);
    channel.sent();
    [[maybe_unused]] const Floats floats{};
    return channel.leave(!is_usable || !take(is_mine ? first : last, is_mine, true));
}

}  // namespace kccl::ll16
