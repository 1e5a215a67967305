// all_reduce, two_shot, simple protocol, push: for GPUs, and messages whose time depends on the
// links' bandwidth. Rank r owns chunk r of each round of the message.
//
//     step s of num_rounds + 2 (rounds.cuh), on rank r:
//         chunk p of round s of in --> input part r of peer p
//         own chunk of round s - 1 of in, and the input parts --reduce--> own chunk of out,
//                                                                and result part r of every peer
//         result parts of round s - 2 --> out
//
//     traffic out per rank: 2 * (world_size - 1) / world_size * n bytes
//
// n is the length of `in` in bytes.
#pragma once

#include "../reduce.cuh"
#include "../rounds.cuh"

namespace kccl {

// Sets every rank's `out` to the reduction of all ranks' `in`, `count` elements of T. `count` may
// be any number. All else is as in all_reduce_one_shot_ll16().
template <class T, class Op, class Coop, int WORLD_SIZE>
KCCL_DEVICE Status all_reduce_two_shot_push_simple(Channel<Coop, WORLD_SIZE>& channel, T* out,
                                                   const T* in, uint64_t count,
                                                   const Op& op = Op{}) {
    if (count == 0) return channel.none();
    const DeviceComm& comm = channel.comm();
    const int world_size = channel.world_size();
    const uint32_t thread = channel.thread();
    const uint32_t size = channel.num_threads();
    const auto part = static_cast<uint32_t>(staging_part_bytes(comm) / sizeof(T));
    const Rounds rounds = {count, part * world_size};
    const auto chunks_of = [&](uint32_t round) {
        return Chunks<T>(rounds.count_of(round), world_size);
    };
    const auto part_of = [&](int rank, uint32_t parity, Half half, int owner) {
        return staging_slot<T>(comm, rank, channel.index(), parity, half) + owner * part;
    };
    const auto push_inputs = [&](uint32_t round) {
        const Chunks<T> chunks = chunks_of(round);
        copy_rows<WORLD_SIZE>(thread, size, world_size - 1, [&](int k) {
            const int peer = channel.receiver(k);
            return Row::of(part_of(peer, channel.parity(), Half::kInput, comm.rank),
                           in + rounds.begin_of(round) + chunks.begin_of(peer),
                           chunks.count_of(peer));
        });
    };
    const auto reduce = [&](uint32_t round, uint32_t parity) {
        const Chunks<T> chunks = chunks_of(round);
        const uint64_t mine = rounds.begin_of(round) + chunks.begin_of(comm.rank);
        const auto row_of = [&](int source) {
            return source == comm.rank ? in + mine
                                       : part_of(comm.rank, parity, Half::kInput, source);
        };
        const auto out_of = [&](int k) {
            const int rank = channel.receiver(k);
            return rank == comm.rank ? out + mine
                                     : part_of(rank, channel.parity(), Half::kResult, comm.rank);
        };
        reduce_lines<T, Op, WORLD_SIZE>(thread, size, chunks.count_of(comm.rank), world_size,
                                        row_of, world_size, out_of, op);
    };
    const auto take_results = [&](uint32_t round, uint32_t parity) {
        const Chunks<T> chunks = chunks_of(round);
        copy_rows<WORLD_SIZE>(thread, size, world_size - 1, [&](int k) {
            const int peer = channel.receiver(k);
            return Row::of(out + rounds.begin_of(round) + chunks.begin_of(peer),
                           part_of(comm.rank, parity, Half::kResult, peer), chunks.count_of(peer));
        });
    };
    const uint32_t num_rounds = rounds.number();
    return in_steps(channel, kKcclAllReduceTwoShotPushSimple, num_rounds + 1,
                    [&](uint32_t s, uint32_t parity) {
                        if (s < num_rounds) push_inputs(s);
                        if (s > 0 && s <= num_rounds) reduce(s - 1, parity);
                        if (s > 1) take_results(s - 2, parity);
                    });
}

namespace kernels {

template <class T, class Op, int WORLD_SIZE>
KCCL_KERNEL_OF(kMostStepThreads)
void all_reduce_two_shot_push_simple(KCCL_KERNEL_PARAM(KcclCall) parameter) {
    const KcclCall& call = platform::first_parameter(parameter);
    Channel<Block, WORLD_SIZE> channel(call, sizeof(T));
    const Slice slice = call_slice<T>(call);
    kccl::all_reduce_two_shot_push_simple<T, Op>(channel, output_of<T>(call) + slice.begin,
                                                 input_of<T>(call) + slice.begin, slice.count,
                                                 operator_of<Op>(call));
}

}  // namespace kernels
}  // namespace kccl
