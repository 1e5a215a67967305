// Ranks as threads of one process: the host core and every kernel that the host has, under a
// sanitizer, without Python. Exits with 1 at the first wrong result, or if a kernel was not called.
// tests/csrc/test_sanitizers.py builds it, and writes two headers that world.h includes:
//
//     dtypes.h    kDtypes: the element types that the kernels were compiled for
//     kernels.h   kKernels: every kernel that the host has
//                 kAlgorithms: those of them among which a plan chooses
//
// Kernels for GPUs only stay out: the simulator runs those. A kernel is one block here, so
// grid_sync waits for nobody.
//
// Windows are ordinary memory that the threads share, so that ThreadSanitizer sees every access to
// them and knows only the order that the source asks for.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <thread>
#include <vector>

#include "csrc/host/host.h"
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

// ---- One checked call -------------------------------------------------------------------------

struct Buffer {
    explicit Buffer(uint64_t num_bytes, uint64_t misalignment)
        : bytes(num_bytes + misalignment), data(bytes.data() + misalignment) {}
    // Exactly as long as needed, so that AddressSanitizer guards the end.
    std::vector<uint8_t> bytes;
    uint8_t* data;
};

void all_reduce(const Rank& rank, int kernel, int dtype, int op, uint64_t count, int channel,
                uint64_t seed, uint64_t misalignment, bool in_place) {
    const int world_size = rank.comm.world_size;
    Buffer in(count * kItemBytes[dtype], misalignment);
    Buffer out(count * kItemBytes[dtype], misalignment);
    for (uint64_t i = 0; i < count; ++i) {
        const int value = oracle::input(op, seed, rank.comm.rank, i, world_size);
        oracle::encode(in.data + i * kItemBytes[dtype], dtype, value);
    }
    uint8_t* result = in_place ? in.data : out.data;
    call(rank, kernel, {result, in.data, count, 0, channel, dtype, op});
    for (uint64_t i = 0; i < count; ++i) {
        uint8_t wanted[8];
        oracle::encode(wanted, dtype, oracle::reduced(op, seed, i, world_size));
        check(memcmp(result + i * kItemBytes[dtype], wanted, kItemBytes[dtype]) == 0,
              "kernel %d dtype %d op %d count %zu: element %zu on rank %d is wrong", kernel, dtype,
              op, size_t(count), size_t(i), rank.comm.rank);
    }
}

void broadcast(const Rank& rank, int kernel, int root, uint64_t num_bytes, int channel,
               uint64_t seed, uint64_t misalignment) {
    Buffer buffer(num_bytes, misalignment);
    for (uint64_t i = 0; i < num_bytes; ++i) {
        buffer.data[i] = rank.comm.rank == root ? uint8_t(oracle::mix(seed, 0, i)) : 0;
    }
    call(rank, kernel, {buffer.data, buffer.data, num_bytes, root, channel});
    for (uint64_t i = 0; i < num_bytes; ++i) {
        check(buffer.data[i] == uint8_t(oracle::mix(seed, 0, i)),
              "kernel %d of %zu bytes from %d: byte %zu on rank %d is wrong", kernel,
              size_t(num_bytes), root, size_t(i), rank.comm.rank);
    }
}

// `count`: elements of one chunk.
void reduce_scatter(const Rank& rank, int kernel, int dtype, int op, uint64_t count, int channel,
                    uint64_t seed, uint64_t misalignment, bool in_place) {
    const int world_size = rank.comm.world_size;
    const uint64_t chunk_bytes = count * kItemBytes[dtype];
    const uint64_t first = rank.comm.rank * count;
    Buffer in(world_size * chunk_bytes, misalignment);
    Buffer out(chunk_bytes, misalignment);
    for (uint64_t i = 0; i < world_size * count; ++i) {
        const int value = oracle::input(op, seed, rank.comm.rank, i, world_size);
        oracle::encode(in.data + i * kItemBytes[dtype], dtype, value);
    }
    uint8_t* result = in_place ? in.data + first * kItemBytes[dtype] : out.data;
    call(rank, kernel, {result, in.data, count, 0, channel, dtype, op});
    for (uint64_t i = 0; i < count; ++i) {
        uint8_t wanted[8];
        oracle::encode(wanted, dtype, oracle::reduced(op, seed, first + i, world_size));
        check(memcmp(result + i * kItemBytes[dtype], wanted, kItemBytes[dtype]) == 0,
              "kernel %d dtype %d op %d count %zu: element %zu on rank %d is wrong", kernel, dtype,
              op, size_t(count), size_t(i), rank.comm.rank);
    }
}

// `num_bytes`: of one chunk.
void all_gather(const Rank& rank, int kernel, uint64_t num_bytes, int channel, uint64_t seed,
                uint64_t misalignment, bool in_place) {
    const int world_size = rank.comm.world_size;
    Buffer in(num_bytes, misalignment);
    Buffer out(world_size * num_bytes, misalignment);
    uint8_t* mine = in_place ? out.data + rank.comm.rank * num_bytes : in.data;
    for (uint64_t i = 0; i < num_bytes; ++i) {
        mine[i] = uint8_t(oracle::mix(seed, rank.comm.rank, i));
    }
    call(rank, kernel, {out.data, mine, num_bytes, 0, channel});
    for (uint64_t i = 0; i < world_size * num_bytes; ++i) {
        check(out.data[i] == uint8_t(oracle::mix(seed, i / num_bytes, i % num_bytes)),
              "kernel %d of %zu bytes: byte %zu on rank %d is wrong", kernel, size_t(num_bytes),
              size_t(i), rank.comm.rank);
    }
}

// A call of a collective by one of its algorithms: a sum of float32, or plain bytes.
void any_collective(const Rank& rank, const Algorithm& algorithm, uint64_t num_bytes, int channel,
                    uint64_t seed) {
    const auto [kernel, collective, needs_floats] = algorithm;
    if (collective == "barrier") {
        call(rank, kernel, {nullptr, nullptr, 0, 0, channel});
    } else if (collective == "all_reduce") {
        all_reduce(rank, kernel, kKcclFloat32, kKcclSum, num_bytes / 4, channel, seed, 0, false);
    } else if (collective == "reduce_scatter") {
        reduce_scatter(rank, kernel, kKcclFloat32, kKcclSum, num_bytes / 4, channel, seed, 0,
                       false);
    } else if (collective == "all_gather") {
        all_gather(rank, kernel, num_bytes, channel, seed, 0, false);
    } else if (collective == "broadcast") {
        const int root = int(oracle::mix(seed, 5, 0) % uint64_t(rank.comm.world_size));
        broadcast(rank, kernel, root, num_bytes, channel, seed, 0);
    } else {
        check(false, "kernel %d is of a new collective: give it a call here", kernel);
    }
}

// ---- Scenarios --------------------------------------------------------------------------------

// Every operator, and every length at which a slot, a packet or a line is filled, cut or
// overfilled.
void matrix(const Rank& rank) {
    const uint64_t lengths[] = {
        8, 16, 24, 72, kPacketBytes, kStagingBytes - 8, kStagingBytes + 8, 3 * kStagingBytes + 40};
    uint64_t seed = 0;
    for (const auto& [kernel, collective, needs_floats] : kAlgorithms) {
        if (collective == "all_gather") {
            for (const uint64_t length : lengths) {
                all_gather(rank, kernel, length - seed % 8, 0, seed, seed % 3, seed % 5 < 2);
                ++seed;
            }
        } else if (collective == "broadcast") {
            for (int root = 0; root < rank.comm.world_size; ++root) {
                for (const uint64_t length : lengths) {
                    broadcast(rank, kernel, root, length - seed % 8, 1, seed, seed % 3);
                    ++seed;
                }
            }
        } else if (collective != "barrier") {
            const bool is_whole = collective == "all_reduce";
            for (const int dtype : kDtypes) {
                if (needs_floats && oracle::is_integer(dtype)) continue;
                for (int op = 0; op < kKcclNumOps; ++op) {
                    if (op == kKcclAvg && oracle::is_integer(dtype)) continue;
                    for (const uint64_t length : lengths) {
                        // Every second message is one element shorter. Some begin on odd addresses.
                        const uint64_t count =
                            length / kItemBytes[dtype] - (seed % 2 && length > 8);
                        const auto reduce = is_whole ? all_reduce : reduce_scatter;
                        reduce(rank, kernel, dtype, op, count, 0, seed, seed % 3, seed % 5 < 2);
                        ++seed;
                    }
                }
            }
        }
    }
}

// The same random sequence of calls on every rank, each rank at its own pace.
void mixture(const Rank& rank, int num_calls, uint64_t seed) {
    for (int i = 0; i < num_calls; ++i, ++seed) {
        const Algorithm& algorithm = kAlgorithms[oracle::mix(seed, 1, 0) % std::size(kAlgorithms)];
        const int channel = int(oracle::mix(seed, 2, 0) % kNumChannels);
        const uint64_t num_bytes = 8 + oracle::mix(seed, 3, 0) % (2 * kStagingBytes);
        if (oracle::mix(seed, 4, rank.comm.rank) % 4 == 0) std::this_thread::yield();
        any_collective(rank, algorithm, num_bytes, channel, seed);
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

int main() {
    for (int world_size = 2; world_size <= 4; ++world_size) {
        World wide(world_size, 32);
        wide.run([](Rank& rank) { matrix(rank); });
        wide.run([](Rank& rank) { mixture(rank, 300, 1000); });
        wide.run([&](Rank& rank) { ring(wide, rank); });
        World narrow(world_size, 4);
        narrow.run([](Rank& rank) { mixture(rank, 300, 2000); });
        narrow.run(exchanges);
        for (const Algorithm& algorithm : kAlgorithms) {
            // A broadcast's root waits for no rank, so a late rank that is not the root causes no
            // time-out.
            if (algorithm.collective != "broadcast") late_rank(world_size, algorithm.kernel);
        }
        abort_of_rank_0(world_size);
    }
    probes();
    for (const int kernel : kKernels) check(called[kernel], "kernel %d was not called", kernel);
    std::puts("all results are right");
    return 0;
}
