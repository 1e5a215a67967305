// Calls that go on behind a failure.
#pragma once

#include <type_traits>

#include "made.cuh"

namespace kccl {

// In a call's place in the lists of programs: an exchange of this rank's blocks only.
constexpr uint32_t kLocalExchange = kCopy + 1;

struct Nothing {
    KCCL_DEVICE explicit Nothing(const DeviceComm&) {}
};

// What a coop keeps open for many calls.
template <class Coop, uint64_t KERNELS>
struct Opened {
    template <uint32_t KERNEL, class T>
    using IfCalled = std::conditional_t<has<KERNELS>(KERNEL), T, Nothing>;

    KCCL_DEVICE Opened(Coop coop, const DeviceComm& comm)
        : channel(coop, comm), barrier(comm), exchange(comm), local(comm) {}

    Channel<Coop> channel;
    IfCalled<kKcclGridSync, GridBarrier> barrier;
    IfCalled<kKcclGridExchange, GridExchange<kKcclReachAllRanks>> exchange;
    IfCalled<kLocalExchange, GridExchange<kKcclReachRank>> local;
};

KCCL_DEVICE Status exchange_sums(GridExchange<kKcclReachAllRanks>& exchange, float* out,
                                 const float* in, uint32_t count) {
    publish(exchange, in, count);
    // Each slice has to be collected by another block than its publisher.
    const uint32_t next = (platform::block_in_grid() + 1) % platform::blocks_per_grid();
    return collect_reduced(exchange, out, count, Slices{next, 1});
}

KCCL_DEVICE Status exchange_slices(GridExchange<kKcclReachRank>& exchange, float* out,
                                   const float* in, uint32_t count) {
    publish(exchange, in, count);
    return collect(exchange, out, count);
}

// A kernel that users' kernels do not call.
template <uint32_t KERNEL>
struct OnlyMade : std::conditional_t<MadeByUsers<KERNEL>::kIsMade, IsNotMade, Made<KERNEL>> {};

// A call of a collective. Called by all threads of the coop. opened: as for make_failing_call().
template <uint64_t KERNELS, class Coop, class... Open>
KCCL_DEVICE Status make_failing_collective(const DeviceComm& comm, const Call& call, Coop coop,
                                           Open&... opened) {
    const auto by_coop = [&](auto collective) {
        if constexpr (sizeof...(opened) != 0) {
            return collective(opened.channel...);
        } else {
            return collective(coop, comm);
        }
    };
    const auto on_channel = [&](auto& channel) {
        return make_by<OnlyMade, KERNELS, float, Sum>(channel, call,
                                                      [] { return Status(kKcclForked); });
    };
    return make_by<MadeByUsers, KERNELS, float, Sum>(by_coop, call, [&] {
        if constexpr (sizeof...(opened) != 0) {
            return on_channel(opened.channel...);
        } else {
            Channel<Coop> channel(coop, comm);
            return on_channel(channel);
        }
    });
}

// Called by all threads of the coop. opened: an Opened, or none; then each call opens its own. The
// elements are floats.
template <uint64_t KERNELS, class Coop, class... Open>
KCCL_DEVICE Status make_failing_call(const DeviceComm& comm, const Call& call, Coop coop,
                                     Open&... opened) {
    [[maybe_unused]] constexpr bool kIsOpen = sizeof...(opened) != 0;
    [[maybe_unused]] auto* const out = output_of<float>(call);
    [[maybe_unused]] const auto* const in = input_of<float>(call);
    [[maybe_unused]] const auto count = static_cast<uint32_t>(call.count);
    if constexpr (has<KERNELS>(kKcclPut) || has<KERNELS>(kKcclGet)) {
        if (call.kernel == kKcclPut || call.kernel == kKcclGet) {
            const bool puts = call.kernel == kKcclPut;
            const Status status = puts ? put<true>(coop, comm, out, in, count)
                                       : get<true>(coop, comm, out, in, count);
            coop.sync();  // any thread may check what others have copied
            return status;
        }
    }
    if constexpr (has<KERNELS>(kKcclSignal)) {
        if (call.kernel == kKcclSignal) return signal(coop, comm, call.peer, call.channel);
    }
    if constexpr (has<KERNELS>(kKcclWait)) {
        if (call.kernel == kKcclWait) return wait(coop, comm, call.peer, call.channel, 1);
    }
    if constexpr (has<KERNELS>(kKcclGridSync)) {
        if (call.kernel == kKcclGridSync) {
            if constexpr (kIsOpen) return (opened.barrier.sync(), ...);
            return grid_sync(comm);
        }
    }
    if constexpr (has<KERNELS>(kKcclGridExchange)) {
        if (call.kernel == kKcclGridExchange) {
            if constexpr (kIsOpen) return (exchange_sums(opened.exchange, out, in, count), ...);
            GridExchange<kKcclReachAllRanks> exchange(comm);
            return exchange_sums(exchange, out, in, count);
        }
    }
    if constexpr (has<KERNELS>(kLocalExchange)) {
        if (call.kernel == kLocalExchange) {
            if constexpr (kIsOpen) return (exchange_slices(opened.local, out, in, count), ...);
            GridExchange<kKcclReachRank> local(comm);
            return exchange_slices(local, out, in, count);
        }
    }
    return make_failing_collective<KERNELS>(comm, call, coop, opened...);
}

// Opens a second one of what the call uses. Called by all threads of the coop.
template <uint64_t KERNELS>
KCCL_DEVICE Status open_second(const DeviceComm& comm, const Call& call) {
    if constexpr (has<KERNELS>(kKcclGridExchange)) {
        if (call.kernel == kKcclGridExchange) {
            GridExchange<kKcclReachAllRanks> second(comm);
            return second.status();
        }
    }
    GridBarrier second(comm);
    return second.sync();
}

// A number for what a call uses that is open: the channel, the barrier, an exchange or nothing.
KCCL_DEVICE uint32_t opened_by(uint32_t kernel) {
    switch (kernel) {
        case kKcclGridSync: return 1;
        case kKcclGridExchange: return 2;
        case kLocalExchange: return 3;
        case kKcclPut:
        case kKcclGet:
        case kKcclSignal:
        case kKcclWait: return 4;
        default: return 0;
    }
}

// In a call's `fit`.
enum : uint32_t { kNotMade = 1, kFails = 2, kOpensSecond = 3 };

// Behind a failure a call waits for nothing. The clock moves on only where all threads wait.
constexpr uint64_t kAtOnceNs = 1000000;

// Elements of the first chunk of a result, where call.share is not 0.
constexpr uint64_t kChecked = 12;

namespace kernels {

// `calls`: `count` for each coop, which makes all of them, whatever they return, or those up to one
// whose `fit` is kNotMade: there it stays away until the communicator has failed. AT_A_TIME: how
// many with the same channel, barrier and exchange open; 0: each call opens its own. A coop's word
// of `wrong` becomes 1 in three cases. A call after a failed one, on the same channel, barrier or
// exchange, returns another status or waits. A call that must fail is ok. Or a call is ok and one
// of the first kChecked elements of its result is not call.share.
template <uint32_t AT_A_TIME, uint64_t KERNELS, class Coop>
KCCL_KERNEL void go_on(KCCL_KERNEL_PARAM(KcclDeviceComm) comm, const Call* calls, uint32_t count,
                       uint32_t* wrong) {
    const Coop coop;
    const Call* mine = calls + uint64_t(default_channel(coop)) * count;
    uint32_t made = 0;
    while (made < count && mem::load_plain(mine + made).fit != kNotMade) ++made;
    // Each of what is open learns of a failure by itself.
    Status first_of[5] = {};
    bool is_wrong = false;
    const auto make = [&](uint32_t i, auto&... opened) {
        const Call call = mem::load_plain(mine + i);
        if (call.fit == kOpensSecond) {
            is_wrong |= open_second<KERNELS>(comm, call) != kKcclOpenedTwice;
            return;
        }
        Status& first = first_of[AT_A_TIME == 0 ? 0 : opened_by(call.kernel)];
        const uint64_t began_ns = mem::clock_ns();
        const Status status = make_failing_call<KERNELS>(comm, call, coop, opened...);
        is_wrong |=
            first != kKcclOk && (status != first || mem::clock_ns() - began_ns >= kAtOnceNs);
        is_wrong |= status == kKcclOk && call.fit == kFails;
        if (first == kKcclOk) first = status;
        if (status != kKcclOk || call.share == 0) return;
        for (uint64_t n = coop.size() - 1 - coop.index(); n < kChecked; n += coop.size()) {
            is_wrong |= mem::load_plain(output_of<float>(call) + n) != float(call.share);
        }
    };
    // The simulator refuses a coop that goes elsewhere, and leaves a late one to the time-outs.
    const auto stay_away = [&] {
        while (made < count && status_of(comm) == kKcclOk) mem::poll_pause();
    };
    for (uint32_t begin = 0; begin < made; begin += AT_A_TIME == 0 ? 1 : AT_A_TIME) {
        if constexpr (AT_A_TIME == 0) {
            make(begin);
        } else {
            Opened<Coop, KERNELS> opened(coop, comm);
            for (uint32_t i = begin; i < begin + AT_A_TIME && i < made; ++i) make(i, opened);
            if (begin + AT_A_TIME >= made) stay_away();
        }
    }
    stay_away();
    if (coop.any(is_wrong) && leads(coop)) mem::store_plain(wrong + default_channel(coop), 1u);
}

}  // namespace kernels
}  // namespace kccl
