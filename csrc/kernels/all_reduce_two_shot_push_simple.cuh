// all_reduce, two_shot, simple protocol, push: for GPUs and messages bound by the links. Rank r owns
// chunk r of the message, or of each block's slice of it.
//
//     reduce-scatter   chunk p of in --> staging[r] of peer p; "staged"
//                      own chunk and staging[..] --reduce--> own chunk of out,
//                      and into result staging of every peer; "reduced"
//     all-gather       result staging, all but the own chunk --> out
//
//     traffic out per rank: 2 * (world_size - 1) / world_size * n bytes
//
// Slices longer than the staging go in rounds, each a call of its own on the channel. The staging
// holds plain data, which the flags order. It may be written again because "reduced" of a peer says
// that it has read the inputs of this call, and "staged" that it has read the results of the last.
#pragma once

#include "../include/kccl/channel.cuh"
#include "../include/kccl/reduce.cuh"

namespace kccl {

// How long a round may be: chunks begin on lines of their own.
KCCL_DEVICE uint64_t two_shot_push_bytes(const DeviceComm& comm) {
    const uint64_t unit = uint64_t(comm.world_size) * kKcclLineBytes;
    return comm.layout.staging_bytes / unit * unit;
}

// Called by all threads of the channel's coop. out and in hold `count` elements of T, at most
// two_shot_push_bytes(); otherwise as all_reduce_one_shot_ll16.
template <class T, class Op, class Coop, int WORLD_SIZE>
KCCL_DEVICE Status all_reduce_two_shot_push_simple(Channel<Coop, WORLD_SIZE>& channel, T* out,
                                                   const T* in, uint32_t count) {
    constexpr uint32_t kPayloads = 2;  // 16 bytes at a time
    constexpr uint32_t kElements = kPayloads * kPayloadElements<T>;
    constexpr uint32_t kLine = kKcclLineBytes / sizeof(T);
    const DeviceComm& comm = channel.comm();
    const int world_size = channel.world_size();
    const uint32_t thread = channel.thread();
    const uint32_t size = channel.num_threads();
    const uint32_t chunk = (count + world_size * kLine - 1) / (world_size * kLine) * kLine;
    const auto begin_of = [&](int rank) { return rank * chunk < count ? rank * chunk : count; };
    const uint32_t mine = begin_of(comm.rank);
    const uint32_t num_mine = begin_of(comm.rank + 1) - mine;

    const Status entered = channel.next(kKcclAllReduceTwoShotPushSimple, Exchange::kPairwise);
    if (entered != kKcclOk) return entered;
    const auto slot = [&](int rank, Half half, int part) {
        return staging_slot<T>(comm, rank, channel.index(), channel.parity(), half) + part * chunk;
    };
    // Over the peers at run time: unrolled, copies only take registers.
    for (int k = 1; k < comm.world_size; ++k) {
        const int peer = (comm.rank + k) % comm.world_size;
        const uint32_t begin = begin_of(peer);
        mem::copy(slot(peer, Half::kInput, comm.rank), in + begin,
                  (begin_of(peer + 1) - begin) * sizeof(T), thread, size);
    }
    channel.template arrive<mem::Order::kRelease>(kKcclFlagStaged);
    const Status staged = channel.template await<mem::Order::kAcquire>(kKcclFlagStaged);
    if (staged != kKcclOk) return staged;

    for (uint32_t i = thread; i * kElements < num_mine; i += size) {
        uint64_t payloads[kMaxRanks<WORLD_SIZE>][kPayloads];
        KCCL_UNROLL
        for (int source = 0; source < kMaxRanks<WORLD_SIZE>; ++source) {
            if (source >= world_size) break;
            const T* row = source == comm.rank ? in + mine : slot(comm.rank, Half::kInput, source);
            load_payloads(payloads[source], row, kPayloads * i, num_mine);
        }
        uint64_t results[kPayloads];
        reduce_packets<T, Op>(results, payloads, world_size);
        for (int k = 1; k < world_size; ++k) {
            T* row = slot((comm.rank + k) % world_size, Half::kResult, comm.rank);
            store_payloads(row, kPayloads * i, num_mine, results);
        }
        store_payloads(out + mine, kPayloads * i, num_mine, results);
    }
    channel.template arrive<mem::Order::kRelease>(kKcclFlagReduced);
    const Status reduced = channel.template await<mem::Order::kAcquire>(kKcclFlagReduced);
    if (reduced != kKcclOk) return reduced;

    for (int k = 1; k < comm.world_size; ++k) {
        const int peer = (comm.rank + k) % comm.world_size;
        const uint32_t begin = begin_of(peer);
        mem::copy(out + begin, slot(comm.rank, Half::kResult, peer),
                  (begin_of(peer + 1) - begin) * sizeof(T), thread, size);
    }
    return channel.leave();
}

namespace kernels {

template <class T, class Op, int WORLD_SIZE>
KCCL_KERNEL void all_reduce_two_shot_push_simple(KCCL_KERNEL_PARAM(KcclCall) call) {
    Channel<Block, WORLD_SIZE> channel(call);
    const Slice slice = call_slice<T>(call);
    in_rounds<T>(call, slice, two_shot_push_bytes(call.comm),
                 [&](T* out, const T* in, uint32_t count) {
                     return kccl::all_reduce_two_shot_push_simple<T, Op>(channel, out, in, count);
                 });
}

}  // namespace kernels
}  // namespace kccl
