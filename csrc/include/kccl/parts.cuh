// Calls in which the part of each pair of ranks has a length of its own: KcclCall.sends, receives.
//
// First every rank pushes packets to every other: how long the part is that it sends there, how
// long its longest part is, and the part's first bytes. So a short call is one exchange. The
// receiver sees whether it expects what is sent. And all ranks know how many rounds the longest
// rest takes, which goes through the staging (rounds.cuh).
#pragma once

#include "exchange.cuh"
#include "rounds.cuh"

namespace kccl {

// The most threads of a block. With more, the values that a thread keeps would not fit its
// registers.
constexpr int kMostPartsThreads = 256;

// The blocks that share a call: this block's number among them, and how many they are.
struct Sharing {
    uint32_t block = 0;
    uint32_t blocks = 1;

    // Returns the bytes of a part of num_bytes that one block moves. A longer part never has a
    // shorter share, so share() of the longest part is the longest share.
    KCCL_DEVICE uint64_t share(uint64_t num_bytes) const {
        constexpr uint64_t kUnit = 16;
        return ((num_bytes + kUnit - 1) / kUnit + blocks - 1) / blocks * kUnit;
    }
    // Returns this block's slice of a part of num_bytes.
    KCCL_DEVICE Slice slice(uint64_t num_bytes) const {
        return slice_of(num_bytes, share(num_bytes), block);
    }
};

// Returns this block's number, and the number of blocks of this launch.
KCCL_DEVICE Sharing launch_sharing() {
    return {platform::block_in_grid(), platform::blocks_per_grid()};
}

// Returns the bytes of the parts before that of `rank`.
KCCL_DEVICE uint64_t bytes_before(const uint64_t* lengths, int rank) {
    uint64_t sum = 0;
    for (int before = 0; before < rank; ++before) sum += lengths[before];
    return sum;
}

// What a thread keeps and does in a call whose parts have lengths of their own: it pushes the
// packets, checks the peers' headers, and then moves what did not fit in the packets. The caller
// calls push() and await_heads(), takes the packets' bytes, ends the channel's call with leave(),
// and then calls push_rests(), which makes further calls on the channel if any part is longer than
// the packets carry. Each thread of the coop constructs an object of its own, and all threads call
// push(), await_heads() and push_rests() together.
template <class Coop, int WORLD_SIZE>
class PartsCall {
  public:
    // The payloads in front of the part's bytes: the header head(), and the length of this rank's
    // longest part. They must be a whole number of units (payload.cuh).
    static constexpr uint32_t kHead = 2;

    KCCL_DEVICE PartsCall(Channel<Coop, WORLD_SIZE>& channel, const uint8_t* in, const Call& call,
                          Sharing sharing)
        : channel_(channel), in_(in), call_(call), sharing_(sharing) {
        most_first_ = channel.max_bytes() - kHead * kPayloadBytes;
    }

    // Returns where the part for `rank` begins.
    KCCL_DEVICE const uint8_t* part_for(int rank) const {
        return in_ + (call_.repeats != 0 ? 0 : bytes_before(call_.sends, rank));
    }

    // Returns the first bytes of this block's slice of a part of num_bytes, which packets carry.
    KCCL_DEVICE Slice first(uint64_t num_bytes) const {
        const Slice slice = sharing_.slice(num_bytes);
        return {slice.begin, slice.count < most_first_ ? slice.count : most_first_};
    }

    // Enters the call and pushes all packets. The payloads of a part are pushed in units of UNIT
    // payloads, and unit u by thread u modulo the coop's size, which also awaits the peers' units
    // u. On failure nothing is sent.
    template <uint32_t UNIT>
    KCCL_DEVICE Status push(KcclKernel kernel) {
        const Status entered = channel_.next(kernel, Exchange::kPairwise);
        if (entered != kKcclOk) return entered;
        const int world_size = channel_.world_size();
        const uint32_t thread = channel_.thread();
        const uint32_t size = channel_.num_threads();
        uint64_t longest = 0;
        for (int rank = 0; rank < world_size; ++rank) {
            if (call_.sends[rank] > longest) longest = call_.sends[rank];
        }
        for (uint32_t i = thread; i < kHead; i += size) {
            KCCL_UNROLL
            for (int k = 0; k < kMaxRanks<WORLD_SIZE>; ++k) {
                if (k >= world_size) break;
                const uint64_t length = call_.sends[channel_.receiver(k)];
                ll16::push_to(channel_, k, i, i == 0 ? head(length) : longest);
            }
        }
        KCCL_UNROLL
        for (int k = 0; k < kMaxRanks<WORLD_SIZE>; ++k) {
            if (k >= world_size) break;
            const int rank = channel_.receiver(k);
            const Slice slice = first(call_.sends[rank]);
            const auto count = static_cast<uint32_t>(slice.count);
            const uint8_t* part = part_for(rank) + slice.begin;
            const uint32_t num = num_payloads<uint8_t>(count);
            for (uint32_t unit = thread; unit * UNIT < num; unit += size) {
                for (uint32_t i = unit * UNIT; i < (unit + 1) * UNIT && i < num; ++i) {
                    ll16::push_to(channel_, k, kHead + i, load_payload(part, i, count, false));
                }
            }
        }
        channel_.sent();
        return kKcclOk;
    }

    // Waits for the headers that all ranks send in front of their parts. Returns false if the wait
    // failed, or if a rank sends something else than this one expects. Then this rank has given up.
    KCCL_DEVICE bool await_heads() {
        uint64_t heads[kMaxRanks<WORLD_SIZE>];
        uint64_t longest[kMaxRanks<WORLD_SIZE>];
        if (!ll16::await_all(channel_, 0, heads)) return false;
        if (!ll16::await_all(channel_, 1, longest)) return false;
        bool are_expected = true;
        KCCL_UNROLL
        for (int source = 0; source < kMaxRanks<WORLD_SIZE>; ++source) {
            if (source >= channel_.world_size()) break;
            if (longest[source] > longest_) longest_ = longest[source];
            if (heads[source] == head(call_.receives[source])) continue;
            // If the peer makes a call of another kernel, its first packet is no header of this
            // one.
            const bool is_head = heads[source] >> 56 == call_.kernel;
            Call theirs = call_;
            theirs.dtype = static_cast<uint32_t>(heads[source] >> 48 & 255);
            refuse_call(channel_.comm(), channel_.awaited(), source,
                        {call_.receives[source], channel_.epoch(), call_in_bits(call_)},
                        {is_head ? heads[source] & kMostLength : 0, channel_.epoch(),
                         is_head ? call_in_bits(theirs) : kUnknownCall});
            are_expected = false;
        }
        return are_expected;
    }

    // Returns a round of the rest of this block's slice: its offset in the part, and its bytes,
    // which are 0 if there is no such round. The rest is what packets do not carry.
    KCCL_DEVICE Slice rest(uint64_t num_bytes, const Rounds& rounds, uint32_t round) const {
        const Slice slice = sharing_.slice(num_bytes);
        const uint64_t begin = most_first_ + rounds.begin_of(round);
        if (begin >= slice.count) return {0, 0};
        const uint64_t left = slice.count - begin;
        return {slice.begin + begin, left < rounds.most ? left : rounds.most};
    }

    // Returns where a round that `source` has sent lies in `rank`'s staging.
    KCCL_DEVICE uint8_t* staged(int rank, uint32_t parity, int source) const {
        const DeviceComm& comm = channel_.comm();
        return staging_slot<uint8_t>(comm, rank, channel_.index(), parity, Half::kResult) +
               source * staging_part_bytes(comm);
    }

    // Moves the rests of all parts through the staging, if any part has more bytes than packets
    // carry. Called when the call of packets has ended. take(rounds, round, parity): uses a round
    // that peers have written to this rank's staging.
    template <class Take>
    KCCL_DEVICE Status push_rests(KcclKernel kernel, Take take) {
        const uint64_t longest = sharing_.share(longest_);
        if (longest <= most_first_) return channel_.status();
        const DeviceComm& comm = channel_.comm();
        const Rounds rounds = {longest - most_first_,
                               static_cast<uint32_t>(staging_part_bytes(comm))};
        const uint32_t num_rounds = rounds.number();
        return in_steps(channel_, kernel, num_rounds + 1, [&](uint32_t s, uint32_t parity) {
            if (s > 0 && s <= num_rounds) {
                copy_rows<WORLD_SIZE>(channel_.thread(), channel_.num_threads(),
                                      channel_.world_size() - 1, [&](int k) {
                                          const int peer = channel_.receiver(k);
                                          const Slice round =
                                              rest(call_.sends[peer], rounds, s - 1);
                                          return Row{staged(peer, channel_.parity(), comm.rank),
                                                     part_for(peer) + round.begin,
                                                     static_cast<uint32_t>(round.count)};
                                      });
            }
            if (s > 1) take(rounds, s - 2, parity);
        });
    }

  private:
    static constexpr uint64_t kMostLength = (uint64_t{1} << 48) - 1;

    // Returns the header that a rank sends in front of a part of `length` bytes.
    KCCL_DEVICE uint64_t head(uint64_t length) const {
        return uint64_t{call_.kernel} << 56 | uint64_t{call_.dtype} << 48 | length;
    }

    Channel<Coop, WORLD_SIZE>& channel_;
    const uint8_t* const in_;
    const Call& call_;
    const Sharing sharing_;
    uint64_t most_first_;   // bytes of a part that go by packets
    uint64_t longest_ = 0;  // bytes of the longest part of all ranks
};

}  // namespace kccl
