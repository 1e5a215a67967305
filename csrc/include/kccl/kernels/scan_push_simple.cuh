// scan, simple protocol, push: for GPUs, and messages whose time depends on the links' bandwidth.
//
//     step s of num_rounds + 2 (rounds.cuh), on rank r:
//         round s - 1 of in --> part r of the staging of every higher rank
//         round s - 2 of in, and parts 0 to r - 1 of its own staging --reduce--> out
//
//     traffic out of rank r: (world_size - 1 - r) * n bytes
//
// n is the length of `in` in bytes.
#pragma once

#include "../reduce.cuh"
#include "../rounds.cuh"

namespace kccl {

// Sets `out` to the reduction of the `in` of ranks 0 to this one, `count` elements of T. If
// `exclusive` is 1 instead of 0, this rank's own `in` is left out. `count` may be any number. All
// else is as in scan_direct_ll16().
template <class T, class Op, class Coop, int WORLD_SIZE>
KCCL_DEVICE Status scan_push_simple(Channel<Coop, WORLD_SIZE>& channel, T* out, const T* in,
                                    uint64_t count, int exclusive, const Op& op = Op{}) {
    if (count == 0) return channel.none();
    const DeviceComm& comm = channel.comm();
    const int world_size = channel.world_size();
    const uint32_t thread = channel.thread();
    const uint32_t size = channel.num_threads();
    const int num_terms = comm.rank + 1 - exclusive;
    const auto part = static_cast<uint32_t>(staging_part_bytes(comm) / sizeof(T));
    const Rounds rounds = {count, part};
    const auto part_of = [&](int rank, uint32_t parity, int source) {
        return staging_slot<T>(comm, rank, channel.index(), parity, Half::kResult) + source * part;
    };
    const auto push = [&](uint32_t round) {
        copy_rows<WORLD_SIZE>(thread, size, world_size - 1 - comm.rank, [&](int k) {
            return Row::of(part_of(comm.rank + 1 + k, channel.parity(), comm.rank),
                           in + rounds.begin_of(round), rounds.count_of(round));
        });
    };
    const auto reduce = [&](uint32_t round, uint32_t parity) {
        const uint64_t begin = rounds.begin_of(round);
        const auto row_of = [&](int source) {
            return source == comm.rank ? in + begin : part_of(comm.rank, parity, source);
        };
        const auto out_of = [&](int) { return out + begin; };
        reduce_lines<T, Op, WORLD_SIZE>(thread, size, rounds.count_of(round), num_terms, row_of, 1,
                                        out_of, op);
    };
    const uint32_t num_rounds = rounds.number();
    return in_steps(channel, kKcclScanPushSimple, num_rounds + 1, [&](uint32_t s, uint32_t parity) {
        if (s > 0 && s <= num_rounds) push(s - 1);
        if (s > 1 && num_terms > 0) reduce(s - 2, parity);
    });
}

namespace kernels {

template <class T, class Op, int WORLD_SIZE>
KCCL_KERNEL_OF(kMostStepThreads)
void scan_push_simple(KCCL_KERNEL_PARAM(KcclCall) parameter) {
    const KcclCall& call = platform::first_parameter(parameter);
    Channel<Block, WORLD_SIZE> channel(call, sizeof(T));
    const Slice slice = call_slice<T>(call);
    kccl::scan_push_simple<T, Op>(channel, output_of<T>(call) + slice.begin,
                                  input_of<T>(call) + slice.begin, slice.count, call.peer,
                                  operator_of<Op>(call));
}

}  // namespace kernels
}  // namespace kccl
