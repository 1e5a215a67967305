// The ranks of one world, with their memory and their threads, and how a rank makes a call.
#pragma once

#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <functional>
#include <thread>
#include <vector>

#include "csrc/host/host.h"
#include "layouts.h"
#include "oracle.h"

constexpr uint64_t kPatientNs = 30'000'000'000;
constexpr size_t kUserBytes = 4096;

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
        const KcclLayout& layout = kLayouts[size];
        for (Rank& rank : ranks) {
            rank.window = std::aligned_alloc(4096, layout.scratch_bytes);
            memset(rank.window, 0, layout.sentinel);
            memset(static_cast<uint8_t*>(rank.window) + layout.sentinel, 0xff,
                   layout.scratch_bytes - layout.sentinel);
            rank.user_window.assign(kUserBytes, 0);
        }
        for (int r = 0; r < size; ++r) {
            Rank& rank = ranks[r];
            for (int32_t& pidfd : rank.context.pidfd) pidfd = -1;
            for (int32_t& pid : rank.context.pid) pid = getpid();
            rank.context.shares_cores = 1;
            rank.state.limit_ns = rank.state.first_limit_ns = kPatientNs;
            rank.state.idle_context = reinterpret_cast<uint64_t>(&rank.context);
            KcclDeviceComm& comm = rank.comm;
            comm.abi_version = kKcclAbiVersion;
            comm.rank = r;
            comm.world_size = size;
            comm.num_channels = kNumChannels;
            comm.blocks_per_channel = 1;
            comm.epoch_step = 1u << (32 - epoch_bits);
            comm.polls_per_check = 1 + static_cast<uint32_t>(r);
            comm.state = reinterpret_cast<uint64_t>(&rank.state);
            comm.channels = reinterpret_cast<uint64_t>(rank.channels);
            comm.layout = layout;
            for (int peer = 0; peer < size; ++peer) {
                comm.window[peer] = reinterpret_cast<uint64_t>(ranks[peer].window);
                comm.scratch[peer] = comm.window[peer];
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
    check(kccl_host_bind(&op) == 0, "kernel %d has no dtype %d, op %d", kernel, op.call.dtype,
          op.call.op);
    return op;
}

inline uint32_t try_call(const Rank& rank, int kernel, const Arguments& arguments) {
    KcclHostOp op = bind(rank, kernel, arguments);
    return kccl_host_run(&op);
}

inline void call(const Rank& rank, int kernel, const Arguments& arguments) {
    const uint32_t status = try_call(rank, kernel, arguments);
    check(status == kKcclOk, "kernel %d on rank %d: status %u", kernel, rank.comm.rank, status);
}
