// Ranks as threads of one process: the host core and every kernel that the host has, under a
// sanitizer, without Python. Exits with 1 at the first wrong result, or if a kernel was not called.
// tests/csrc/test_sanitizers.py builds it, and writes two headers:
//
//     dtypes.h    kDtypes: the element types that the kernels were compiled for
//     kernels.h   kKernels: every kernel that the host has
//                 kAlgorithms: those of them among which a plan chooses, with what they move
//
// Kernels for GPUs only stay out: the simulator runs those. A kernel is one block here, so
// grid_sync waits for nobody.
//
// Windows are ordinary memory that the threads share, so that ThreadSanitizer sees every access to
// them and knows only the order that the source asks for.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <thread>
#include <vector>

#include "csrc/host/host.h"
#include "kernels.h"
#include "oracle.h"
#include "world.h"

namespace kccl::host {
// Why: core.cpp asks for the tables of this CPU, and one table under a sanitizer is enough.
#if defined(__x86_64__)
extern const KernelTable kKernelsV3 = kKernelsBaseline;
extern const KernelTable kKernelsV4 = kKernelsBaseline;
#endif
}  // namespace kccl::host

namespace {

constexpr uint64_t kShortNs = 30'000'000;

// ---- Scenarios --------------------------------------------------------------------------------

// Every operator, and every length of kLengths.
void matrix(const Rank& rank) {
    uint64_t seed = 0;
    for (const Algorithm& algorithm : kAlgorithms) {
        matrix_of(rank, algorithm, seed);
    }
}

// Every rank makes the same random sequence of calls, at its own pace.
void mixture(const Rank& rank, int num_calls, uint64_t seed) {
    for (int i = 0; i < num_calls; ++i, ++seed) {
        const Algorithm& algorithm = kAlgorithms[oracle::mix(seed, 1, 0) % std::size(kAlgorithms)];
        const int channel = int(oracle::mix(seed, 2, 0) % kNumChannels);
        const uint64_t num_bytes = 8 + oracle::mix(seed, 3, 0) % (2 * kStagingBytes);
        if (oracle::mix(seed, 4, rank.comm.rank) % 4 == 0) std::this_thread::yield();
        any_call(rank, algorithm, num_bytes, channel, seed);
    }
}

// Data goes round by put, signal and wait; then each rank gets it from its other neighbour.
void ring(World& world, Rank& rank) {
    const int world_size = rank.comm.world_size;
    const int next = (rank.comm.rank + 1) % world_size;
    const int previous = (rank.comm.rank + world_size - 1) % world_size;
    std::vector<uint8_t> sent(kUserBytes), received(kUserBytes);
    for (uint64_t turn = 0; turn < 8; ++turn) {
        const int signal_id = int(turn % 3);
        for (uint64_t i = 0; i < kUserBytes; ++i) {
            sent[i] = uint8_t(oracle::mix(turn, uint64_t(rank.comm.rank), i));
        }
        call(rank, kKcclPut, {world.ranks[next].user_window.data(), sent.data(), kUserBytes, next});
        call(rank, kKcclSignal, {nullptr, nullptr, 0, next, signal_id});
        call(rank, kKcclWait, {nullptr, nullptr, 1, turn % 2 ? previous : -1, signal_id});
        for (uint64_t i = 0; i < kUserBytes; ++i) {
            check(rank.user_window[i] == uint8_t(oracle::mix(turn, uint64_t(previous), i)),
                  "byte %zu of turn %zu is wrong on rank %d", size_t(i), size_t(turn),
                  rank.comm.rank);
        }
        call(rank, kKcclGet,
             {received.data(), world.ranks[next].user_window.data(), kUserBytes, next});
        check(received == sent, "rank %d got back other bytes than it put", rank.comm.rank);
        // Nobody puts the next turn's bytes before all have read this turn's.
        call(rank, kKcclBarrierDirect, {nullptr, nullptr, 0, 0, 0});
    }
}

// Parts with lengths of their own: some are empty, some fill a slot of packets, some take rounds.
void parts(const Rank& rank) {
    constexpr uint64_t kPartLengths[] = {0, 8, 40, kPacketBytes, 400, 3 * kStagingBytes};
    const int world_size = rank.comm.world_size, me = rank.comm.rank;
    const auto byte = [](uint64_t turn, int from, int to, uint64_t i) {
        return uint8_t(oracle::mix(turn * 64 + uint64_t(from * 8 + to), 5, i));
    };
    for (uint64_t turn = 0; turn < 24; ++turn) {
        const auto length = [&](int from, int to) {
            return kPartLengths[oracle::mix(turn, uint64_t(from), uint64_t(to)) %
                                std::size(kPartLengths)];
        };
        Arguments moved;
        std::vector<uint8_t> in, want;
        for (int peer = 0; peer < world_size; ++peer) {
            moved.sends.push_back(length(me, peer));
            moved.receives.push_back(length(peer, me));
            for (uint64_t i = 0; i < length(me, peer); ++i) in.push_back(byte(turn, me, peer, i));
            for (uint64_t i = 0; i < length(peer, me); ++i) want.push_back(byte(turn, peer, me, i));
        }
        std::vector<uint8_t> out(want.size());
        moved.input = in.data();
        moved.output = out.data();
        call(rank, kKcclAllToAllParts, moved);
        check(out == want, "the parts of turn %zu are wrong on rank %d", size_t(turn), me);
        Arguments summed;
        summed.dtype = kDtypes[0];
        summed.sends.resize(world_size);
        for (int peer = 0; peer < world_size; ++peer) summed.sends[peer] = length(0, peer);
        summed.receives.assign(world_size, summed.sends[me]);
        uint64_t all = 0;
        for (const uint64_t bytes : summed.sends) all += bytes;
        std::vector<uint8_t> x(all), result(summed.sends[me], 0xff);
        summed.input = x.data();
        summed.output = result.data();
        call(rank, kKcclReduceScatterParts, summed);
        check(result == std::vector<uint8_t>(result.size()), "a sum of zeros is wrong on rank %d",
              me);
    }
}

// Exchanges of one block of each rank. They go round the board's slots, and the epochs wrap.
void exchanges(const Rank& rank) {
    constexpr uint64_t kSliceBytes = 24;
    const int world_size = rank.comm.world_size;
    std::vector<uint8_t> slice(kSliceBytes), all(kSliceBytes * world_size);
    for (uint64_t turn = 0; turn < 40; ++turn) {
        for (uint64_t i = 0; i < kSliceBytes; ++i) {
            slice[i] = uint8_t(oracle::mix(turn, uint64_t(rank.comm.rank), i));
        }
        call(rank, kKcclGridExchange, {all.data(), slice.data(), kSliceBytes});
        for (uint64_t i = 0; i < all.size(); ++i) {
            check(all[i] == uint8_t(oracle::mix(turn, i / kSliceBytes, i % kSliceBytes)),
                  "byte %zu of exchange %zu is wrong on rank %d", size_t(i), size_t(turn),
                  rank.comm.rank);
        }
        call(rank, kKcclGridSync, {nullptr, nullptr, 3});
    }
}

// The last rank comes too late. The ranks that wait for it fail. The late rank may still complete
// that call, but fails in the next. Every rank stays failed, and has the record of the time-out.
void late_rank(int world_size, int kernel) {
    World world(world_size, 32);
    // Relaxed, so that it orders nothing that the calls do not.
    std::atomic<int> num_failed = 0;
    for (Rank& rank : world.ranks) rank.state.limit_ns = rank.state.first_limit_ns = kShortNs;
    world.run([&](Rank& rank) {
        constexpr uint64_t kCount = 64;
        std::vector<float> x(kCount * world_size, 1.0f), out(kCount * world_size);
        const bool is_late = rank.comm.rank == world_size - 1;
        while (is_late && num_failed.load(std::memory_order_relaxed) < world_size - 1) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        const uint32_t first = try_call(rank, kernel, {out.data(), x.data(), kCount});
        num_failed.fetch_add(1, std::memory_order_relaxed);
        const uint32_t status = try_call(rank, kKcclBarrierDirect, {});
        const bool is_right = status == kKcclAborted || (status == kKcclTimeout && !is_late);
        check(is_right && (first == status || (is_late && first == kKcclOk)),
              "kernel %d on rank %d after a time-out: %u, then %u", kernel, rank.comm.rank, first,
              status);
        const KcclRecord& record = rank.state.record;
        check(record.status == kKcclTimeout && record.kernel == uint32_t(kernel) &&
                  record.waited_ns > kShortNs,
              "kernel %d on rank %d: the record is not of the time-out", kernel, rank.comm.rank);
        check(try_call(rank, kKcclBarrierDirect, {}) == status, "a status does not stay");
    });
}

// Rank 0 gives up on its own while the others wait for it.
void abort_of_rank_0(int world_size) {
    World world(world_size, 32);
    world.run([&](Rank& rank) {
        if (rank.comm.rank == 0) {
            KcclRecord record = {};
            record.status = kKcclPeerLost;
            kccl_host_abort(&rank.comm, &record);
            return;
        }
        const uint32_t status = try_call(rank, kKcclBarrierDirect, {});
        check(status == kKcclAborted, "rank %d after rank 0 gave up: %u", rank.comm.rank, status);
        check(rank.state.record.status == kKcclPeerLost, "the cause's record did not arrive");
    });
}

// The measurements of probe.cpp, and the timed loop.
void probes() {
    check(kccl_host_core_ping_pong(0, 1 << 20, 10) < 0, "a core that does not exist answers");
    alignas(kKcclLineBytes) static uint32_t words[2][kKcclLineBytes / 4];
    double one_way_ns[2];
    const auto play = [&](int i) {
        one_way_ns[i] = kccl_host_ping_pong(words[i], words[1 - i], 50, i == 0, kPatientNs);
    };
    std::thread other(play, 1);
    play(0);
    other.join();
    check(one_way_ns[0] > 0 && one_way_ns[1] > 0, "the ping-pong ended early");

    std::vector<uint8_t> from(1000, 7), to(1000);
    double us[16];
    kccl_host_copy(to.data(), from.data(), from.size(), 16, us);
    check(to == from, "kccl_host_copy copies something else");
    World world(2, 32);
    world.run([](Rank& rank) {
        double times[16];
        KcclHostOp op = bind(rank, kKcclBarrierDirect, {});
        check(kccl_host_time(&op, 16, times) == kKcclOk, "the clocked loop failed");
    });
}

}  // namespace

// The largest world size may be given; it is 4 otherwise.
int main(int argc, char** argv) {
    const int most_ranks = argc > 1 ? std::atoi(argv[1]) : 4;
    for (int world_size = 2; world_size <= most_ranks; ++world_size) {
        World wide(world_size, 32);
        wide.run([](Rank& rank) { matrix(rank); });
        wide.run([](Rank& rank) { mixture(rank, 300, 1000); });
        wide.run([&](Rank& rank) { ring(wide, rank); });
        World narrow(world_size, 4);
        narrow.run([](Rank& rank) { mixture(rank, 300, 2000); });
        narrow.run(exchanges);
        narrow.run(parts);
        for (const Algorithm& algorithm : kAlgorithms) {
            const bool waits_for_all = !algorithm.moves || algorithm.moves->waits_for_all;
            if (waits_for_all) late_rank(world_size, algorithm.kernel);
        }
        abort_of_rank_0(world_size);
    }
    probes();
    for (const int kernel : kKernels) check(called[kernel], "kernel %d was not called", kernel);
    std::puts("all results are right");
    return 0;
}
