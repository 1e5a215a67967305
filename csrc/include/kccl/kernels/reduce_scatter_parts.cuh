// reduce_scatter in which each part has a length of its own: rank p ends with the reduction of all
// ranks' part p.
//
//     rank r:  part p of in --packets, and the rest through the staging--> rank p
//              part r of in, and what the others have sent --reduce--> out
//
// The length of a part may be 0. parts.cuh says how a part is sent.
#pragma once

#include "../parts.cuh"
#include "../reduce.cuh"

namespace kccl {

// Sets `out` to the reduction of all ranks' parts for this rank. call.sends[p] is the length of the
// part for rank p in bytes, the same on all ranks, and every entry of call.receives is the length
// of this rank's part. All else is as in all_to_all_parts(). `out` is this rank's part of `in`, or
// does not overlap `in`.
template <class T, class Op, class Coop, int WORLD_SIZE>
KCCL_DEVICE Status reduce_scatter_parts(Channel<Coop, WORLD_SIZE>& channel, T* out, const T* in,
                                        const Call& call, Sharing sharing = {},
                                        const Op& op = Op{}) {
    constexpr uint32_t kUnit = kUnitPayloads<T>;
    using Parts = PartsCall<Coop, WORLD_SIZE>;
    static_assert(Parts::kHead % kUnit == 0, "units begin behind the head");
    Parts parts(channel, reinterpret_cast<const uint8_t*>(in), call, sharing);
    const Status entered = parts.template push<kUnit>(kKcclReduceScatterParts);
    if (entered != kKcclOk) return entered;
    const int world_size = channel.world_size();
    const int rank = channel.comm().rank;
    const uint32_t thread = channel.thread();
    const uint32_t size = channel.num_threads();
    [[maybe_unused]] const platform::DefaultFloats floats{};
    const Slice first = parts.first(call.receives[rank]);
    const auto count = static_cast<uint32_t>(first.count / sizeof(T));
    const uint32_t num = num_units<T>(count);
    bool failed = !parts.await_heads();
    for (uint32_t turn = 0; turn < num && !failed; turn += size) {
        const bool is_mine = turn + thread < num;
        const uint32_t i = is_mine ? turn + thread : num - 1;
        uint64_t units[kMaxRanks<WORLD_SIZE> * kUnit];
        failed = !ll16::await_units<kUnit>(channel, Parts::kHead / kUnit + i, units);
        if (failed || !is_mine) continue;
        uint64_t reduced[kUnit];
        reduce_unit<T, Op, kMaxRanks<WORLD_SIZE>>(reduced, units, kUnit, world_size, op);
        store_unit(out + first.begin / sizeof(T), i, count, reduced, false);
    }
    if (channel.leave(failed) != kKcclOk) return channel.status();
    return parts.push_rests(
        kKcclReduceScatterParts, [&](const Rounds& rounds, uint32_t round, uint32_t parity) {
            const Slice rest = parts.rest(call.receives[rank], rounds, round);
            const auto* mine = reinterpret_cast<const T*>(parts.part_for(rank) + rest.begin);
            const auto row_of = [&](int source) {
                if (source == rank) return mine;
                return reinterpret_cast<const T*>(parts.staged(rank, parity, source));
            };
            T* const to = out + rest.begin / sizeof(T);
            const auto length = static_cast<uint32_t>(rest.count / sizeof(T));
            // Compilers for CPUs make vector code only for loops over whole rows.
            if constexpr (platform::kCpu) {
                const T* rows[kKcclMaxWorldSize];
                for (int source = 0; source < world_size; ++source) rows[source] = row_of(source);
                reduce_rows<T, Op>(channel.coop(), to, rows, world_size, length, op);
            } else {
                reduce_lines<T, Op, WORLD_SIZE>(
                    thread, size, length, world_size, row_of, 1, [&](int) { return to; }, op);
            }
        });
}

namespace kernels {

template <class T, class Op, int WORLD_SIZE>
KCCL_KERNEL_OF(kMostPartsThreads)
void reduce_scatter_parts(KCCL_KERNEL_PARAM(KcclCall) parameter) {
    const KcclCall& call = platform::first_parameter(parameter);
    Channel<Block, WORLD_SIZE> channel(call);
    kccl::reduce_scatter_parts<T, Op>(channel, output_of<T>(call), input_of<T>(call), call,
                                      launch_sharing(), operator_of<Op>(call));
}

}  // namespace kernels
}  // namespace kccl
