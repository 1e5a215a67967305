// broadcast, simple protocol, push: for GPUs, and messages whose time depends on the links'
// bandwidth. The peers, counted from the root on, own a chunk each of each round of the message.
//
//     step s of num_rounds + 2 (rounds.cuh):
//         root:    chunk k of round s of in --> input part of peer k
//         peer k:  its input part, of round s - 1 --> result part k of every other peer, and out
//                  the other result parts, of round s - 2 --> out
//
//     traffic out: the root's n bytes; a peer's n * (world_size - 2) / (world_size - 1)
//
// n is the length of `in` in bytes. In every step each rank waits for a flag of every other rank.
// So the call is pairwise (channel.cuh), and the next call need not wait for credits.
#pragma once

#include "../rounds.cuh"

namespace kccl {

// Returns the bytes of a round, at most `most`: a quarter of the message, so that steps overlap,
// but at least so much that the flags do not take longer than the data.
KCCL_DEVICE uint32_t broadcast_round(uint64_t count, uint32_t most) {
    constexpr uint64_t kLeast = 32768;
    const uint64_t quarter = (count / 4 + kKcclLineBytes - 1) / kKcclLineBytes * kKcclLineBytes;
    const uint64_t round = quarter > kLeast ? quarter : kLeast;
    return round < most ? static_cast<uint32_t>(round) : most;
}

// Copies the root's `in`, `count` bytes, to the `out` of all other ranks. `count` may be any
// number. All else is as in broadcast_direct_ll16().
template <class Coop, int WORLD_SIZE>
KCCL_DEVICE Status broadcast_push_simple(Channel<Coop, WORLD_SIZE>& channel, uint8_t* out,
                                         const uint8_t* in, uint64_t count, int root) {
    const DeviceComm& comm = channel.comm();
    const int num_peers = comm.world_size - 1;
    if (count == 0 || num_peers == 0) return channel.none();
    const uint32_t thread = channel.thread();
    const uint32_t size = channel.num_threads();
    const auto staging = static_cast<uint32_t>(comm.layout.staging_bytes);
    const uint32_t part = staging / (num_peers * kKcclLineBytes) * kKcclLineBytes;
    const Rounds rounds = {count, broadcast_round(count, part * num_peers)};
    // This rank's number among the peers, counted from the rank behind the root; num_peers on the
    // root.
    const int mine = (comm.rank - root + num_peers) % comm.world_size;
    const auto rank_of = [&](int peer) { return (root + 1 + peer) % comm.world_size; };
    const auto chunks_of = [&](uint32_t round) {
        return Chunks<uint8_t>(rounds.count_of(round), num_peers);
    };
    const auto part_of = [&](int peer, uint32_t parity, Half half, int owner) {
        return staging_slot<uint8_t>(comm, rank_of(peer), channel.index(), parity, half) +
               owner * part;
    };
    const auto scatter = [&](uint32_t round) {
        const Chunks<uint8_t> chunks = chunks_of(round);
        copy_rows<WORLD_SIZE>(thread, size, num_peers, [&](int peer) {
            return Row{part_of(peer, channel.parity(), Half::kInput, peer),
                       in + rounds.begin_of(round) + chunks.begin_of(peer), chunks.count_of(peer)};
        });
    };
    // Copies this rank's chunk to the other peers, and to `out`, which is the last row.
    const auto forward = [&](uint32_t round, uint32_t parity) {
        const Chunks<uint8_t> chunks = chunks_of(round);
        copy_rows<WORLD_SIZE>(thread, size, num_peers, [&](int k) {
            const int peer = (mine + 1 + k) % num_peers;
            uint8_t* to = peer == mine ? out + rounds.begin_of(round) + chunks.begin_of(mine)
                                       : part_of(peer, channel.parity(), Half::kResult, mine);
            return Row{to, part_of(mine, parity, Half::kInput, mine), chunks.count_of(mine)};
        });
    };
    const auto take = [&](uint32_t round, uint32_t parity) {
        const Chunks<uint8_t> chunks = chunks_of(round);
        copy_rows<WORLD_SIZE>(thread, size, num_peers - 1, [&](int k) {
            const int peer = (mine + 1 + k) % num_peers;
            return Row{out + rounds.begin_of(round) + chunks.begin_of(peer),
                       part_of(mine, parity, Half::kResult, peer), chunks.count_of(peer)};
        });
    };
    const bool is_root = comm.rank == root;
    const uint32_t num_rounds = rounds.number();
    return in_steps(channel, kKcclBroadcastPushSimple, num_rounds + 1,
                    [&](uint32_t s, uint32_t parity) {
                        if (is_root && s < num_rounds) scatter(s);
                        if (is_root) return;
                        if (s > 0 && s <= num_rounds) forward(s - 1, parity);
                        if (s > 1) take(s - 2, parity);
                    });
}

namespace kernels {

template <int WORLD_SIZE>
KCCL_KERNEL_OF(kMostStepThreads)
void broadcast_push_simple(KCCL_KERNEL_PARAM(KcclCall) parameter) {
    const KcclCall& call = platform::first_parameter(parameter);
    Channel<Block, WORLD_SIZE> channel(call, 1);
    const Slice slice = call_slice<uint8_t>(call);
    kccl::broadcast_push_simple(channel, output_of<uint8_t>(call) + slice.begin,
                                input_of<uint8_t>(call) + slice.begin, slice.count, call.peer);
}

}  // namespace kernels
}  // namespace kccl
