// Ranks as threads of one process: the host core and every kernel under a sanitizer, without Python.
// Exits with 1 at the first wrong result. tests/test_sanitizers.py builds it and writes layouts.h:
// kLayouts[world_size], the numbers of kccl.memory.layout, and the settings they were made for.
//
// Windows are ordinary memory that the threads share, so that ThreadSanitizer sees every access to
// them and knows only the order that the source asks for.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "csrc/host/host.h"
#include "csrc/host/idle.h"
#include "layouts.h"
#include "oracle.h"

namespace kccl::host {
// Why: core.cpp asks for the tables of this CPU, and one table under a sanitizer is enough.
#if defined(__x86_64__)
extern const KernelTable kKernelsV3 = kKernelsBaseline;
extern const KernelTable kKernelsV4 = kKernelsBaseline;
#endif
}  // namespace kccl::host

namespace {

constexpr uint64_t kPatientNs = 30'000'000'000;
constexpr uint64_t kShortNs = 30'000'000;
constexpr size_t kUserBytes = 4096;

struct Rank {
    KcclState state = {};
    KcclHostContext context = {};
    KcclDeviceComm comm = {};
    void* window = nullptr;
    std::vector<uint8_t> user_window;  // what put and get reach
};

class World {
  public:
    World(int size, int epoch_bits) : ranks(size) {
        const KcclLayout& layout = kLayouts[size];
        for (Rank& rank : ranks) {
            rank.window = std::aligned_alloc(4096, layout.window_bytes);
            memset(rank.window, 0, layout.window_bytes);
            rank.user_window.assign(kUserBytes, 0);
        }
        for (int r = 0; r < size; ++r) {
            Rank& rank = ranks[r];
            for (int32_t& pidfd : rank.context.pidfd) pidfd = -1;
            rank.context.shares_cores = 1;
            rank.state.limit_ns = rank.state.first_limit_ns = kPatientNs;
            rank.state.idle_context = reinterpret_cast<uint64_t>(&rank.context);
            KcclDeviceComm& comm = rank.comm;
            comm.abi_version = kKcclAbiVersion;
            comm.rank = r;
            comm.world_size = size;
            comm.num_channels = kNumChannels;
            comm.epoch_step = 1u << (32 - epoch_bits);
            comm.polls_per_check = 1 + static_cast<uint32_t>(r);
            comm.state = reinterpret_cast<uint64_t>(&rank.state);
            comm.layout = layout;
            for (int peer = 0; peer < size; ++peer) {
                comm.window[peer] = reinterpret_cast<uint64_t>(ranks[peer].window);
            }
        }
    }
    ~World() {
        for (Rank& rank : ranks) std::free(rank.window);
    }

    void run(const std::function<void(Rank&)>& be) {
        std::vector<std::thread> threads;
        for (Rank& rank : ranks) threads.emplace_back([&be, &rank] { be(rank); });
        for (std::thread& thread : threads) thread.join();
    }

    std::vector<Rank> ranks;
};

struct Arguments {
    void* output = nullptr;
    const void* input = nullptr;
    uint64_t count = 0;
    int peer = 0;
    int channel = 0;
    int dtype = 0;
    int op = 0;
};

KcclHostOp bind(const Rank& rank, int kernel, const Arguments& arguments) {
    KcclHostOp op = {};
    op.call.comm = rank.comm;
    op.call.kernel = static_cast<uint32_t>(kernel);
    op.call.output = reinterpret_cast<uint64_t>(arguments.output);
    op.call.input = reinterpret_cast<uint64_t>(arguments.input);
    op.call.count = arguments.count;
    op.call.peer = arguments.peer;
    op.call.channel = arguments.channel;
    op.call.dtype = static_cast<uint32_t>(arguments.dtype);
    op.call.op = static_cast<uint32_t>(arguments.op);
    check(kccl_host_bind(&op) == 0, "kernel %d has no dtype %d, op %d", kernel, op.call.dtype, op.call.op);
    return op;
}

uint32_t try_call(const Rank& rank, int kernel, const Arguments& arguments) {
    KcclHostOp op = bind(rank, kernel, arguments);
    return kccl_host_run(&op);
}

void call(const Rank& rank, int kernel, const Arguments& arguments) {
    const uint32_t status = try_call(rank, kernel, arguments);
    check(status == kKcclOk, "kernel %d on rank %d: status %u", kernel, rank.comm.rank, status);
}

// ---- One checked call -------------------------------------------------------------------------

struct Buffer {
    explicit Buffer(uint64_t num_bytes, uint64_t misalignment)
        : bytes(num_bytes + misalignment), data(bytes.data() + misalignment) {}
    std::vector<uint8_t> bytes;  // exactly as long as needed, so that AddressSanitizer guards its end
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
              "kernel %d dtype %d op %d count %zu: element %zu on rank %d is wrong", kernel, dtype, op,
              size_t(count), size_t(i), rank.comm.rank);
    }
}

void broadcast(const Rank& rank, int kernel, int root, uint64_t num_bytes, int channel, uint64_t seed,
               uint64_t misalignment) {
    Buffer buffer(num_bytes, misalignment);
    for (uint64_t i = 0; i < num_bytes; ++i) {
        buffer.data[i] = rank.comm.rank == root ? uint8_t(oracle::mix(seed, 0, i)) : 0;
    }
    call(rank, kernel, {buffer.data, buffer.data, num_bytes, root, channel});
    for (uint64_t i = 0; i < num_bytes; ++i) {
        check(buffer.data[i] == uint8_t(oracle::mix(seed, 0, i)),
              "kernel %d of %zu bytes from %d: byte %zu on rank %d is wrong", kernel, size_t(num_bytes),
              root, size_t(i), rank.comm.rank);
    }
}

bool is_all_reduce(int kernel) {
    return kernel == kKcclAllReduceOneShotLl16 || kernel == kKcclAllReduceOneShotPullSimple ||
           kernel == kKcclAllReduceTwoShotPullSimple;
}

constexpr int kCollectives[] = {kKcclAllReduceOneShotLl16,       kKcclAllReduceOneShotPullSimple,
                                kKcclAllReduceTwoShotPullSimple, kKcclBroadcastDirectLl16,
                                kKcclBroadcastPullSimple,        kKcclBarrierDirect};

// ---- Scenarios --------------------------------------------------------------------------------

// Every dtype, operator and length at which a slot, a packet or a line is filled, cut or overfilled.
void matrix(const Rank& rank) {
    const uint64_t lengths[] = {8, 16, 24, 72, kPacketBytes, kStagingBytes - 8, kStagingBytes + 8,
                                3 * kStagingBytes + 40};
    uint64_t seed = 0;
    for (const int kernel : kCollectives) {
        if (!is_all_reduce(kernel)) continue;
        for (int dtype = 0; dtype < kKcclNumDtypes; ++dtype) {
            for (int op = 0; op < kKcclNumOps; ++op) {
                if (op == kKcclAvg && oracle::is_integer(dtype)) continue;
                for (const uint64_t length : lengths) {
                    // One element less than whole words every second time, and on odd addresses.
                    const uint64_t count = length / kItemBytes[dtype] - (seed % 2 && length > 8);
                    all_reduce(rank, kernel, dtype, op, count, 0, seed, seed % 3, seed % 5 < 2);
                    ++seed;
                }
            }
        }
    }
    for (const int kernel : {kKcclBroadcastDirectLl16, kKcclBroadcastPullSimple}) {
        for (int root = 0; root < rank.comm.world_size; ++root) {
            for (const uint64_t length : lengths) {
                broadcast(rank, kernel, root, length - seed % 8, 1, seed, seed % 3);
                ++seed;
            }
        }
    }
}

// The same random sequence of calls on every rank, each rank at its own pace.
void mixture(const Rank& rank, int num_calls, uint64_t seed) {
    for (int i = 0; i < num_calls; ++i, ++seed) {
        const int kernel = kCollectives[oracle::mix(seed, 1, 0) % std::size(kCollectives)];
        const int channel = int(oracle::mix(seed, 2, 0) % kNumChannels);
        const uint64_t num_bytes = 8 + oracle::mix(seed, 3, 0) % (2 * kStagingBytes);
        if (oracle::mix(seed, 4, rank.comm.rank) % 4 == 0) std::this_thread::yield();
        if (kernel == kKcclBarrierDirect) {
            call(rank, kernel, {nullptr, nullptr, 0, 0, channel});
        } else if (is_all_reduce(kernel)) {
            all_reduce(rank, kernel, kKcclFloat32, kKcclSum, num_bytes / 4, channel, seed, 0, false);
        } else {
            const int root = int(oracle::mix(seed, 5, 0) % uint64_t(rank.comm.world_size));
            broadcast(rank, kernel, root, num_bytes, channel, seed, 0);
        }
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
                  "byte %zu of turn %zu is wrong on rank %d", size_t(i), size_t(turn), rank.comm.rank);
        }
        call(rank, kKcclGet, {received.data(), world.ranks[next].user_window.data(), kUserBytes, next});
        check(received == sent, "rank %d got back other bytes than it put", rank.comm.rank);
        // Nobody puts the next turn's bytes before all have read this turn's.
        call(rank, kKcclBarrierDirect, {nullptr, nullptr, 0, 0, 0});
    }
}

// The last rank comes too late: whoever waits for it fails, it fails as well, and all stay failed.
void late_rank(int world_size, int kernel) {
    World world(world_size, 32);
    for (Rank& rank : world.ranks) rank.state.limit_ns = rank.state.first_limit_ns = kShortNs;
    world.run([&](Rank& rank) {
        std::vector<float> x(64, 1.0f);
        const bool is_late = rank.comm.rank == world_size - 1;
        if (is_late) std::this_thread::sleep_for(std::chrono::nanoseconds(4 * kShortNs));
        const uint32_t status = try_call(rank, kernel, {x.data(), x.data(), x.size()});
        const bool is_right = status == kKcclAborted || (status == kKcclTimeout && !is_late);
        check(is_right, "kernel %d on rank %d after a time-out: %u", kernel, rank.comm.rank, status);
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

// The floors of probe.cpp, and the clocked loop.
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
        for (const int kernel : kCollectives) {
            // A broadcast's root waits for nobody, so nobody times out on a late one of the others.
            const bool is_pairwise = is_all_reduce(kernel) || kernel == kKcclBarrierDirect;
            if (is_pairwise) late_rank(world_size, kernel);
        }
        abort_of_rank_0(world_size);
    }
    probes();
    std::puts("all results are right");
    return 0;
}
