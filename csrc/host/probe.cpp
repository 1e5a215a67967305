// Measures two times that benchmarks print beside every result, because no call can be faster: how
// long a cache line takes from one core to another, and how long a copy takes.
#include <pthread.h>
#include <sched.h>
#include <string.h>

#include "../include/kccl/mem.cuh"
#include "host.h"

namespace {

using kccl::mem::Order;
using kccl::mem::Scope;

// Polls until *word is `wanted`, and reads the clock once in 4096 polls. Returns false if limit_ns
// nanoseconds have passed before.
bool poll_until(const uint32_t* word, uint32_t wanted, uint64_t limit_ns) {
    uint64_t started = 0;
    for (uint32_t polls = 1; kccl::mem::load<Order::kRelaxed, Scope::kSystem>(word) != wanted;
         ++polls) {
        kccl::mem::poll_pause();
        if (polls % 4096 != 0) continue;
        const uint64_t now = kccl::mem::clock_ns();
        if (started == 0) started = now;
        if (now - started > limit_ns) return false;
        sched_yield();
    }
    return true;
}

struct alignas(kKcclLineBytes) Line {
    uint32_t word = 0;
};

bool pin(int cpu) {
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    return pthread_setaffinity_np(pthread_self(), sizeof(set), &set) == 0;
}

struct Player {
    int cpu;
    Line* mine;
    Line* theirs;
    uint64_t iterations;
    int leads;
    double one_way_ns = -1;
};

void* play(void* argument) {
    constexpr uint64_t kLimitNs = 2'000'000'000;
    auto* player = static_cast<Player*>(argument);
    // If this thread may not run on its core, it writes nothing, and the other thread times out.
    if (pin(player->cpu)) {
        player->one_way_ns = kccl_host_ping_pong(&player->mine->word, &player->theirs->word,
                                                 player->iterations, player->leads, kLimitNs);
    }
    return nullptr;
}

}  // namespace

extern "C" {

double kccl_host_ping_pong(uint32_t* mine, uint32_t* theirs, uint64_t iterations, int leads,
                           uint64_t limit_ns) {
    constexpr uint32_t kWarmUp = 200;
    uint64_t started = 0;
    for (uint32_t i = 1; i <= kWarmUp + iterations; ++i) {
        if (i == kWarmUp + 1) started = kccl::mem::clock_ns();
        if (leads) kccl::mem::store<Order::kRelaxed, Scope::kSystem>(theirs, i);
        if (!poll_until(mine, i, limit_ns)) return -1;
        if (!leads) kccl::mem::store<Order::kRelaxed, Scope::kSystem>(theirs, i);
    }
    return static_cast<double>(kccl::mem::clock_ns() - started) /
           (2.0 * static_cast<double>(iterations));
}

double kccl_host_core_ping_pong(int cpu_a, int cpu_b, uint64_t iterations) {
    Line lines[2];
    Player players[2] = {{cpu_a, &lines[0], &lines[1], iterations, 1},
                         {cpu_b, &lines[1], &lines[0], iterations, 0}};
    pthread_t threads[2];
    int started = 0;
    while (started < 2 &&
           pthread_create(&threads[started], nullptr, play, &players[started]) == 0) {
        ++started;
    }
    for (int i = 0; i < started; ++i) pthread_join(threads[i], nullptr);
    return started == 2 && players[1].one_way_ns >= 0 ? players[0].one_way_ns : -1;
}

void kccl_host_copy(void* to, const void* from, uint64_t num_bytes, uint64_t iterations,
                    double* us) {
    uint64_t before = kccl::mem::clock_ns();
    for (uint64_t i = 0; i < iterations; ++i) {
        memcpy(to, from, num_bytes);
        // Without this fence the compiler may leave out copies whose result nobody reads.
        __atomic_signal_fence(__ATOMIC_SEQ_CST);
        const uint64_t after = kccl::mem::clock_ns();
        us[i] = static_cast<double>(after - before) * 1e-3;
        before = after;
    }
}

}  // extern "C"
