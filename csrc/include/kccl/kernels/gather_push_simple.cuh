// gather, simple protocol, push: for GPUs, and messages whose time depends on the links' bandwidth.
//
//     step s of num_rounds + 2 (rounds.cuh), on rank r:
//         round s - 1 of in --> part r of the root's staging    n bytes out
//         root: round s - 2: part p of its own staging --> chunk p of out
//
// n is the length of `in` in bytes. In every step each rank waits for a flag of every other rank.
// So the call is pairwise (channel.cuh), and the next call need not wait for credits.
#pragma once

#include "../rounds.cuh"

namespace kccl {

// Copies the `in` of each rank p, `count` bytes, to out + p * stride on the root. `count` may be
// any number. All else is as in gather_direct_ll16().
template <class Coop, int WORLD_SIZE>
KCCL_DEVICE Status gather_push_simple(Channel<Coop, WORLD_SIZE>& channel, uint8_t* out,
                                      const uint8_t* in, uint64_t count, uint64_t stride,
                                      int root) {
    if (count == 0) return channel.none();
    const DeviceComm& comm = channel.comm();
    const int world_size = channel.world_size();
    const uint32_t thread = channel.thread();
    const uint32_t size = channel.num_threads();
    const bool is_root = comm.rank == root;
    const auto part = static_cast<uint32_t>(staging_part_bytes(comm));
    const Rounds rounds = {count, part};
    const auto part_of = [&](uint32_t parity, int source) {
        return staging_slot<uint8_t>(comm, root, channel.index(), parity, Half::kResult) +
               source * part;
    };
    // The root copies its own chunk straight to `out`, unless it is there already.
    const auto push = [&](uint32_t round) {
        const uint64_t begin = rounds.begin_of(round);
        const uint32_t length = rounds.count_of(round);
        uint8_t* to = is_root ? out + root * stride + begin : part_of(channel.parity(), comm.rank);
        if (to == in + begin) return;
        copy_rows<WORLD_SIZE>(thread, size, 1, [&](int) { return Row{to, in + begin, length}; });
    };
    const auto take = [&](uint32_t round, uint32_t parity) {
        copy_rows<WORLD_SIZE>(thread, size, world_size - 1, [&](int k) {
            const int peer = channel.receiver(k);
            return Row{out + peer * stride + rounds.begin_of(round), part_of(parity, peer),
                       rounds.count_of(round)};
        });
    };
    const uint32_t num_rounds = rounds.number();
    return in_steps(channel, kKcclGatherPushSimple, num_rounds + 1,
                    [&](uint32_t s, uint32_t parity) {
                        if (s > 0 && s <= num_rounds) push(s - 1);
                        if (s > 1 && is_root) take(s - 2, parity);
                    });
}

namespace kernels {

template <int WORLD_SIZE>
KCCL_KERNEL_OF(kMostStepThreads)
void gather_push_simple(KCCL_KERNEL_PARAM(KcclCall) parameter) {
    const KcclCall& call = platform::first_parameter(parameter);
    Channel<Block, WORLD_SIZE> channel(call, call.comm.world_size);
    const Slice slice = call_slice<uint8_t>(call);
    kccl::gather_push_simple(channel, output_of<uint8_t>(call) + slice.begin,
                             input_of<uint8_t>(call) + slice.begin, slice.count, call.count,
                             call.peer);
}

}  // namespace kernels
}  // namespace kccl
