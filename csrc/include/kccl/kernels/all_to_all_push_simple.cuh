// all_to_all, simple protocol, push: for GPUs, and messages whose time depends on the links'
// bandwidth.
//
//     step s of num_rounds + 2 (rounds.cuh), on rank r:
//         round s - 1 of chunk p of in --> part r of peer p's staging
//         round s - 2: part p of its own staging --> chunk p of out
//
//     traffic out per rank: (world_size - 1) * n bytes, where n is the length of one chunk
//
// `out` may be `in`: a step overwrites only the round that the step before has pushed.
#pragma once

#include "../rounds.cuh"

namespace kccl {

// Sends the chunk at in + p * stride, `count` bytes, to each rank p, and stores the chunk from rank
// p at out + p * stride. `count` may be any number. All else is as in all_to_all_direct_ll16().
template <class Coop, int WORLD_SIZE>
KCCL_DEVICE Status all_to_all_push_simple(Channel<Coop, WORLD_SIZE>& channel, uint8_t* out,
                                          const uint8_t* in, uint64_t count, uint64_t stride) {
    if (count == 0) return channel.none();
    const DeviceComm& comm = channel.comm();
    const int world_size = channel.world_size();
    const uint32_t thread = channel.thread();
    const uint32_t size = channel.num_threads();
    const auto part = static_cast<uint32_t>(staging_part_bytes(comm));
    const Rounds rounds = {count, part};
    const uint64_t own = comm.rank * stride;
    const auto part_of = [&](int rank, uint32_t parity, int source) {
        return staging_slot<uint8_t>(comm, rank, channel.index(), parity, Half::kResult) +
               source * part;
    };
    const auto push = [&](uint32_t round) {
        const uint64_t begin = rounds.begin_of(round);
        const uint32_t length = rounds.count_of(round);
        copy_rows<WORLD_SIZE>(thread, size, world_size - 1, [&](int k) {
            const int peer = channel.receiver(k);
            return Row{part_of(peer, channel.parity(), comm.rank), in + peer * stride + begin,
                       length};
        });
        if (out != in) mem::copy(out + own + begin, in + own + begin, length, thread, size);
    };
    const auto take = [&](uint32_t round, uint32_t parity) {
        copy_rows<WORLD_SIZE>(thread, size, world_size - 1, [&](int k) {
            const int peer = channel.receiver(k);
            return Row{out + peer * stride + rounds.begin_of(round),
                       part_of(comm.rank, parity, peer), rounds.count_of(round)};
        });
    };
    const uint32_t num_rounds = rounds.number();
    return in_steps(channel, kKcclAllToAllPushSimple, num_rounds + 1,
                    [&](uint32_t s, uint32_t parity) {
                        if (s > 0 && s <= num_rounds) push(s - 1);
                        if (s > 1) take(s - 2, parity);
                    });
}

namespace kernels {

template <int WORLD_SIZE>
KCCL_KERNEL_OF(kMostStepThreads)
void all_to_all_push_simple(KCCL_KERNEL_PARAM(KcclCall) parameter) {
    const KcclCall& call = platform::first_parameter(parameter);
    Channel<Block, WORLD_SIZE> channel(call, call.comm.world_size);
    const Slice slice = call_slice<uint8_t>(call);
    kccl::all_to_all_push_simple(channel, output_of<uint8_t>(call) + slice.begin,
                                 input_of<uint8_t>(call) + slice.begin, slice.count, call.count);
}

}  // namespace kernels
}  // namespace kccl
