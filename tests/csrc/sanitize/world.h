// The ranks of one world, with their memory and their threads, and how a rank makes a call.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "csrc/host/host.h"
#include "csrc/include/kccl/device_comm.h"
#include "oracle.h"

// Which kernels were called. Relaxed, so that it orders nothing that the calls do not.
inline std::atomic<bool> called[kKcclNumKernels];

constexpr uint64_t kPatientNs = 30'000'000'000;
constexpr size_t kUserBytes = 4096;
constexpr uint64_t kPageBytes = 4096;
// Small slots, so that short messages already go in rounds.
constexpr uint32_t kNumChannels = 3;
constexpr uint64_t kPacketBytes = 64;
constexpr uint64_t kStagingBytes = 1024;

struct Rank {
    KcclState state = {};
    KcclChannelState channels[kNumChannels] = {};
    KcclHostContext context = {};
    KcclDeviceComm comm = {};
    void* window = nullptr;
    std::vector<uint8_t> user_window;  // what put and get reach
};

class World {
  public:
    World(int size, int epoch_bits) : ranks(size) {
        const KcclSizes sizes = {
            kNumChannels,  1,  static_cast<uint32_t>(epoch_bits), 0, kPacketBytes,
            kStagingBytes, 256};
        const KcclLayout layout = kccl::layout(static_cast<uint64_t>(size), sizes, kPageBytes);
        std::vector<uint64_t> windows;
        for (Rank& rank : ranks) {
            rank.window = std::aligned_alloc(kPageBytes, layout.scratch_bytes);
            memset(rank.window, 0, layout.sentinel);
            memset(static_cast<uint8_t*>(rank.window) + layout.sentinel, 0xff,
                   layout.scratch_bytes - layout.sentinel);
            rank.user_window.assign(kUserBytes, 0);
            windows.push_back(reinterpret_cast<uint64_t>(rank.window));
        }
        for (int r = 0; r < size; ++r) {
            Rank& rank = ranks[r];
            for (int32_t& pidfd : rank.context.pidfd) pidfd = -1;
            for (int32_t& pid : rank.context.pid) pid = getpid();
            rank.context.shares_cores = 1;
            rank.state.limit_ns = rank.state.first_limit_ns = kPatientNs;
            rank.state.idle_context = reinterpret_cast<uint64_t>(&rank.context);
            const kccl::Addresses addresses = {windows.data(), windows.data(),
                                               reinterpret_cast<uint64_t>(&rank.state),
                                               reinterpret_cast<uint64_t>(rank.channels)};
            rank.comm = kccl::make_comm(r, size, sizes, addresses, kPageBytes,
                                        1 + static_cast<uint32_t>(r));
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
    std::vector<uint64_t> sends = {}, receives = {};  // of kernels of parts
};

inline KcclHostOp bind(const Rank& rank, int kernel, const Arguments& arguments) {
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
    std::copy(arguments.sends.begin(), arguments.sends.end(), op.call.sends);
    std::copy(arguments.receives.begin(), arguments.receives.end(), op.call.receives);
    check(kccl_host_bind(&op) == 0, "kernel %d has no dtype %d, op %d", kernel, op.call.dtype,
          op.call.op);
    return op;
}

inline uint32_t try_call(const Rank& rank, int kernel, const Arguments& arguments) {
    KcclHostOp op = bind(rank, kernel, arguments);
    called[kernel].store(true, std::memory_order_relaxed);
    return kccl_host_run(&op);
}

inline void call(const Rank& rank, int kernel, const Arguments& arguments) {
    const uint32_t status = try_call(rank, kernel, arguments);
    check(status == kKcclOk, "kernel %d on rank %d: status %u", kernel, rank.comm.rank, status);
}
