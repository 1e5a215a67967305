// Many calls in one launch: between them nothing orders memory but the calls themselves.
// What sim_makes.py writes stands before this file.
#pragma once

#include <kccl/kernels/send_recv.cuh>

#include "made.cuh"

namespace kccl {

struct alignas(8) ShortSlice {
    uint8_t bytes[256];
};

// The slice that a block collects if `share` is not 0: that of the block `share` further on. So
// each slice is collected once.
KCCL_DEVICE Slices slice_of_another(const Call& call) {
    const uint32_t blocks = platform::blocks_per_grid();
    if (blocks == 1) return {0, 1};
    const uint32_t further = 1 + (call.share - 1) % (blocks - 1);
    return {(platform::block_in_grid() + further) % blocks, 1};
}

// The slices of all ranks' blocks that a block collects in exchange `i`: all but the last, or all
// but the first.
KCCL_DEVICE Slices most_slices(const Call& call, uint32_t i, uint32_t num_slices) {
    const uint32_t block = platform::block_in_grid();
    const bool is_last = block == platform::blocks_per_grid() - 1;
    return {block == 0 || (!is_last && (call.share + i) % 2 == 1) ? 1u : 0u, num_slices - 1};
}

// Some exchanges by one GridExchange. Each publishes the next `count` bytes of `input`, and
// collects all slices, or some, into the next part of `output`. If call.fit is not 0, every other
// slice has only so many bytes.
template <KcclReach REACH, mem::Order order>
KCCL_DEVICE Status exchange(const DeviceComm& comm, const Call& call) {
    GridExchange<REACH> blocks(comm);
    KCCL_BLOCK_SHARED(ShortSlice, shared);
    Status status = blocks.status();
    for (uint32_t i = 0; int(i) < call.channel && status == kKcclOk; ++i) {
        const bool is_other = i % 2 == 1 && call.fit != 0;
        const uint32_t count = is_other ? call.fit : static_cast<uint32_t>(call.count);
        const uint8_t* in = input_of<uint8_t>(call) + i * call.count;
        // kAcqRel lets a block publish what other threads have just written.
        if (order == mem::Order::kAcqRel && count <= sizeof(shared)) {
            for (uint32_t at = blocks.num_threads() - 1 - blocks.thread(); at < count;
                 at += blocks.num_threads()) {
                mem::store_plain(shared.bytes + at, mem::load_plain(in + at));
            }
            in = shared.bytes;
        }
        publish<order>(blocks, in, count);
        const Slices all = {0, blocks.num_slices()};
        const Slices some = call.share == 0           ? all
                            : REACH == kKcclReachRank ? slice_of_another(call)
                                                      : most_slices(call, i, all.num);
        uint8_t* const out = output_of<uint8_t>(call) + uint64_t{i} * some.num * call.count;
        status = call.share == 0 ? collect<order>(blocks, out, count)
                                 : collect<order>(blocks, out, count, some);
    }
    return status;
}

// An exchange by collect_reduced(): a slice has `count` elements, and `output` gets the sums.
template <class T, class Op, mem::Order order>
KCCL_DEVICE Status exchange_reduced(const DeviceComm& comm, const Call& call) {
    GridExchange<kKcclReachAllRanks> blocks(comm);
    const auto count = static_cast<uint32_t>(call.count);
    Status status = blocks.status();
    for (uint32_t i = 0; int(i) < call.channel && status == kKcclOk; ++i) {
        publish<order>(blocks, input_of<T>(call) + i * call.count, count);
        const Slices all = {0, blocks.num_blocks()};
        const Slices some = call.share == 0 ? all : slice_of_another(call);
        T* const out = output_of<T>(call) + uint64_t{i} * some.num * call.count;
        status = call.share == 0 ? collect_reduced<Op, order>(blocks, out, count)
                                 : collect_reduced<Op, order>(blocks, out, count, some);
    }
    return status;
}

// Every form of an exchange, by call.peer. EXCHANGES: bits of the forms that the list may hold.
template <uint32_t EXCHANGES, class T, class Op>
KCCL_DEVICE Status make_exchange(const DeviceComm& comm, const Call& call) {
    constexpr mem::Order kRelaxed = mem::Order::kRelaxed;
    constexpr mem::Order kAcqRel = mem::Order::kAcqRel;
    if constexpr (has<EXCHANGES>(0)) {
        if (call.peer == 0) return exchange<kKcclReachRank, kRelaxed>(comm, call);
    }
    if constexpr (has<EXCHANGES>(1)) {
        if (call.peer == 1) return exchange<kKcclReachRank, kAcqRel>(comm, call);
    }
    if constexpr (has<EXCHANGES>(2)) {
        if (call.peer == 2) return exchange<kKcclReachAllRanks, kRelaxed>(comm, call);
    }
    if constexpr (has<EXCHANGES>(3)) {
        if (call.peer == 3) return exchange<kKcclReachAllRanks, kAcqRel>(comm, call);
    }
    if constexpr (has<EXCHANGES>(4)) {
        if (call.peer == 4) return exchange_reduced<T, Op, kRelaxed>(comm, call);
    }
    if constexpr (has<EXCHANGES>(5)) {
        if (call.peer == 5) return exchange_reduced<T, Op, kAcqRel>(comm, call);
    }
    return kKcclForked;
}

// A call of no collective. Called by all threads of the channel's coop.
template <uint64_t KERNELS, uint32_t EXCHANGES, class T, class Op, class Coop>
KCCL_DEVICE Status make_other_call([[maybe_unused]] Channel<Coop>& channel, const Call& call) {
    [[maybe_unused]] const Coop coop = channel.coop();
    [[maybe_unused]] const DeviceComm& comm = channel.comm();
    if constexpr (has<KERNELS>(kCopy)) {
        if (call.kernel == kCopy) {
            copy_by_others(coop, call);
            // The next call may read what was written.
            coop.sync();
            return kKcclOk;
        }
    }
    void* bytes_out = output_of<void>(call);
    const void* bytes_in = input_of<void>(call);
    if constexpr (has<KERNELS>(kKcclPut)) {
        if (call.kernel == kKcclPut) return put(coop, comm, bytes_out, bytes_in, call.count);
    }
    if constexpr (has<KERNELS>(kKcclGet)) {
        if (call.kernel == kKcclGet) return get(coop, comm, bytes_out, bytes_in, call.count);
    }
    if constexpr (has<KERNELS>(kKcclSignal)) {
        if (call.kernel == kKcclSignal) return signal(coop, comm, call.peer, call.channel);
    }
    if constexpr (has<KERNELS>(kKcclWait)) {
        if (call.kernel == kKcclWait) {
            return wait(coop, comm, call.peer, call.channel, static_cast<uint32_t>(call.count));
        }
    }
    if constexpr (has<KERNELS>(kKcclSendRecv)) {
        if (call.kernel == kKcclSendRecv) return send_recv(coop, comm, call, 0, 1);
    }
    if constexpr (has<KERNELS>(kKcclGridSync)) {
        if (call.kernel == kKcclGridSync) return grid_sync(comm, call.count);
    }
    if constexpr (has<KERNELS>(kKcclGridExchange)) {
        if (call.kernel == kKcclGridExchange) return make_exchange<EXCHANGES, T, Op>(comm, call);
    }
    return kKcclForked;
}

// Called by all threads of the channel's coop. T, Op: of every reduction in the list.
template <uint64_t KERNELS, uint32_t EXCHANGES, class T, class Op, class Coop>
KCCL_DEVICE Status make_call(Channel<Coop>& channel, const Call& call) {
    return make_by<Made, KERNELS, T, Op>(
        channel, call, [&] { return make_other_call<KERNELS, EXCHANGES, T, Op>(channel, call); });
}

namespace kernels {

// `calls`: `count` for each coop of the grid. Every `at_a_time` calls the channel is closed and
// opened again.
template <class Coop, uint64_t KERNELS, uint32_t EXCHANGES, class T, class Op>
KCCL_KERNEL void sequence(KCCL_KERNEL_PARAM(KcclDeviceComm) comm, const Call* calls, uint32_t count,
                          uint32_t at_a_time) {
    const Coop coop;
    const Call* mine = calls + uint64_t(default_channel(coop)) * count;
    Status status = kKcclOk;
    for (uint32_t first = 0; first < count; first += at_a_time) {
        Channel<Coop> channel(coop, comm);
        for (uint32_t i = first; i < first + at_a_time && i < count; ++i) {
            if (status != kKcclOk) continue;
            const Call call = mem::load_plain(mine + i);
            status = make_call<KERNELS, EXCHANGES, T, Op>(channel, call);
        }
    }
}

}  // namespace kernels
}  // namespace kccl
