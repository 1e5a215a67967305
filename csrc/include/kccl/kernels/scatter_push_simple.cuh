// scatter, simple protocol, push: for GPUs, and messages whose time depends on the links'
// bandwidth.
//
//     step s of num_rounds + 2 (rounds.cuh):
//         root:    round s - 1 of chunk p of in --> peer p's staging
//         others:  round s - 2: their own staging --> out
//
//     traffic out of the root: (world_size - 1) * n bytes, where n is the length of one chunk
//
// In every step each rank waits for a flag of every other rank. So the call is pairwise
// (channel.cuh), and the next call need not wait for credits.
#pragma once

#include "../rounds.cuh"

namespace kccl {

// Copies the root's chunk at in + p * stride, `count` bytes, to the `out` of each rank p. `count`
// may be any number. All else is as in scatter_direct_ll16().
template <class Coop, int WORLD_SIZE>
KCCL_DEVICE Status scatter_push_simple(Channel<Coop, WORLD_SIZE>& channel, uint8_t* out,
                                       const uint8_t* in, uint64_t count, uint64_t stride,
                                       int root) {
    if (count == 0) return channel.none();
    const DeviceComm& comm = channel.comm();
    const int world_size = channel.world_size();
    const uint32_t thread = channel.thread();
    const uint32_t size = channel.num_threads();
    const bool is_root = comm.rank == root;
    // A round is only as long as one rank's part of the staging, although the root is the only
    // source, so that steps overlap.
    const Rounds rounds = {count, static_cast<uint32_t>(staging_part_bytes(comm))};
    const auto staging_of = [&](int rank, uint32_t parity) {
        return staging_slot<uint8_t>(comm, rank, channel.index(), parity, Half::kResult);
    };
    const auto push = [&](uint32_t round) {
        const uint64_t begin = rounds.begin_of(round);
        const uint32_t length = rounds.count_of(round);
        copy_rows<WORLD_SIZE>(thread, size, world_size - 1, [&](int k) {
            const int peer = channel.receiver(k);
            return Row{staging_of(peer, channel.parity()), in + peer * stride + begin, length};
        });
        const uint8_t* own = in + root * stride;
        if (out != own) mem::copy(out + begin, own + begin, length, thread, size);
    };
    const auto take = [&](uint32_t round, uint32_t parity) {
        copy_rows<WORLD_SIZE>(thread, size, 1, [&](int) {
            return Row{out + rounds.begin_of(round), staging_of(comm.rank, parity),
                       rounds.count_of(round)};
        });
    };
    const uint32_t num_rounds = rounds.number();
    return in_steps(channel, kKcclScatterPushSimple, num_rounds + 1,
                    [&](uint32_t s, uint32_t parity) {
                        if (is_root && s > 0 && s <= num_rounds) push(s - 1);
                        if (s > 1 && !is_root) take(s - 2, parity);
                    });
}

namespace kernels {

template <int WORLD_SIZE>
KCCL_KERNEL_OF(kMostStepThreads)
void scatter_push_simple(KCCL_KERNEL_PARAM(KcclCall) parameter) {
    const KcclCall& call = platform::first_parameter(parameter);
    Channel<Block, WORLD_SIZE> channel(call, call.comm.world_size);
    const Slice slice = call_slice<uint8_t>(call);
    kccl::scatter_push_simple(channel, output_of<uint8_t>(call) + slice.begin,
                              input_of<uint8_t>(call) + slice.begin, slice.count, call.count,
                              call.peer);
}

}  // namespace kernels
}  // namespace kccl
