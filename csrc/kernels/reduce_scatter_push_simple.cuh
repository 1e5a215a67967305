// reduce_scatter, simple protocol, push: for GPUs and messages bound by the links.
//
//     rank r:  "reduced" to every peer, and from all    each has read what earlier calls laid there
//              chunk p of in --copy--> part r of peer p's staging    (world_size - 1) * n bytes out
//              "staged" to every peer                                one word each
//              chunk r of in and the parts of its own staging --reduce--> out
//
// n is the length of one chunk. Rounds, the order of the staging's uses and the half that they take
// are as in all_gather_push_simple.
#pragma once

#include "../include/kccl/channel.cuh"
#include "../include/kccl/reduce.cuh"

namespace kccl {

// Called by all threads of the channel's coop. out holds `count` elements of T, at most
// staging_part_bytes(); otherwise as reduce_scatter_direct_ll16.
template <class T, class Op, class Coop, int WORLD_SIZE>
KCCL_DEVICE Status reduce_scatter_push_simple(Channel<Coop, WORLD_SIZE>& channel, T* out,
                                              const T* in, uint32_t count, uint64_t stride) {
    constexpr uint32_t kPayloads = 2;  // 16 bytes at a time
    constexpr uint32_t kElements = kPayloads * kPayloadElements<T>;
    constexpr uint32_t kLine = kKcclLineBytes / sizeof(T);
    const DeviceComm& comm = channel.comm();
    const int world_size = channel.world_size();
    const uint32_t thread = channel.thread();
    const uint32_t size = channel.num_threads();
    const uint32_t part = (count + kLine - 1) / kLine * kLine;

    const Status entered = channel.next(kKcclReduceScatterPushSimple, Exchange::kPairwise);
    if (entered != kKcclOk) return entered;
    channel.template arrive<mem::Order::kRelease>(kKcclFlagReduced);
    const Status vacated = channel.template await<mem::Order::kAcquire>(kKcclFlagReduced);
    if (vacated != kKcclOk) return vacated;

    const auto part_of = [&](int rank, int source) {
        return staging_slot<T>(comm, rank, channel.index(), channel.parity(), Half::kResult) +
               source * part;
    };
    // Over the peers at run time: unrolled, copies only take registers.
    for (int k = 0; k + 1 < comm.world_size; ++k) {
        const int peer = channel.receiver(k);
        mem::copy(part_of(peer, comm.rank), in + peer * stride, count * sizeof(T), thread, size);
    }
    channel.template arrive<mem::Order::kRelease>(kKcclFlagStaged);
    const Status staged = channel.template await<mem::Order::kAcquire>(kKcclFlagStaged);
    if (staged != kKcclOk) return staged;

    for (uint32_t i = thread; i * kElements < count; i += size) {
        uint64_t payloads[kMaxRanks<WORLD_SIZE>][kPayloads];
        KCCL_UNROLL
        for (int source = 0; source < kMaxRanks<WORLD_SIZE>; ++source) {
            if (source >= world_size) break;
            const T* row = source == comm.rank ? in + source * stride : part_of(comm.rank, source);
            load_payloads(payloads[source], row, kPayloads * i, count);
        }
        uint64_t results[kPayloads];
        reduce_packets<T, Op>(results, payloads, world_size);
        store_payloads(out, kPayloads * i, count, results);
    }
    return channel.leave();
}

namespace kernels {

template <class T, class Op, int WORLD_SIZE>
KCCL_KERNEL void reduce_scatter_push_simple(KCCL_KERNEL_PARAM(KcclCall) call) {
    Channel<Block, WORLD_SIZE> channel(call);
    const Slice slice = call_slice<T>(call);
    in_rounds<T>(
        call, slice, staging_part_bytes(call.comm), [&](T* out, const T* in, uint32_t count) {
            return kccl::reduce_scatter_push_simple<T, Op>(channel, out, in, count, call.count);
        });
}

}  // namespace kernels
}  // namespace kccl
