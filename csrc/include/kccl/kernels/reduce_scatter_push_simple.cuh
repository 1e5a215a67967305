// reduce_scatter, simple protocol, push: for GPUs, and messages whose time depends on the links'
// bandwidth.
//
//     step s of num_rounds + 2 (rounds.cuh), on rank r:
//         round s - 1 of chunk p of in --> part r of peer p's staging
//         round s - 2 of chunk r of in, and the parts of its own staging --reduce--> out
//
//     traffic out per rank: (world_size - 1) * n bytes, where n is the length of one chunk
#pragma once

#include "../reduce.cuh"
#include "../rounds.cuh"

namespace kccl {

// Sets `out` to the reduction of the chunks that all ranks have for this rank, `count` elements of
// T each. The chunk for rank p is at in + p * stride. `count` may be any number. All else is as in
// reduce_scatter_direct_ll16().
template <class T, class Op, class Coop, int WORLD_SIZE>
KCCL_DEVICE Status reduce_scatter_push_simple(Channel<Coop, WORLD_SIZE>& channel, T* out,
                                              const T* in, uint64_t count, uint64_t stride,
                                              const Op& op = Op{}) {
    if (count == 0) return channel.none();
    const DeviceComm& comm = channel.comm();
    const int world_size = channel.world_size();
    const uint32_t thread = channel.thread();
    const uint32_t size = channel.num_threads();
    const auto part = static_cast<uint32_t>(staging_part_bytes(comm) / sizeof(T));
    const Rounds rounds = {count, part};
    const auto part_of = [&](int rank, uint32_t parity, int source) {
        return staging_slot<T>(comm, rank, channel.index(), parity, Half::kResult) + source * part;
    };
    const auto push = [&](uint32_t round) {
        copy_rows<WORLD_SIZE>(thread, size, world_size - 1, [&](int k) {
            const int peer = channel.receiver(k);
            return Row::of(part_of(peer, channel.parity(), comm.rank),
                           in + peer * stride + rounds.begin_of(round), rounds.count_of(round));
        });
    };
    const auto reduce = [&](uint32_t round, uint32_t parity) {
        const T* mine = in + comm.rank * stride + rounds.begin_of(round);
        const auto row_of = [&](int source) {
            return source == comm.rank ? mine : part_of(comm.rank, parity, source);
        };
        const auto out_of = [&](int) { return out + rounds.begin_of(round); };
        reduce_lines<T, Op, WORLD_SIZE>(thread, size, rounds.count_of(round), world_size, row_of, 1,
                                        out_of, op);
    };
    const uint32_t num_rounds = rounds.number();
    return in_steps(channel, kKcclReduceScatterPushSimple, num_rounds + 1,
                    [&](uint32_t s, uint32_t parity) {
                        if (s > 0 && s <= num_rounds) push(s - 1);
                        if (s > 1) reduce(s - 2, parity);
                    });
}

namespace kernels {

template <class T, class Op, int WORLD_SIZE>
KCCL_KERNEL_OF(kMostStepThreads)
void reduce_scatter_push_simple(KCCL_KERNEL_PARAM(KcclCall) parameter) {
    const KcclCall& call = platform::first_parameter(parameter);
    Channel<Block, WORLD_SIZE> channel(call, call.comm.world_size * sizeof(T));
    const Slice slice = call_slice<T>(call);
    kccl::reduce_scatter_push_simple<T, Op>(channel, output_of<T>(call) + slice.begin,
                                            input_of<T>(call) + slice.begin, slice.count,
                                            call.count, operator_of<Op>(call));
}

}  // namespace kernels
}  // namespace kccl
