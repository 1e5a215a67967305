// all_reduce between threads of a C++ program, on a CPU, without Python and without CUDA.
//
//     g++ -std=c++20 -O2 -pthread -I"$(kccl include-dir)" all_reduce_cpu.cpp -o all_reduce_cpu
//
// In a checkout the folder is csrc/include.
#include <cstdio>
#include <kccl/cpu.hpp>
#include <vector>

constexpr int kRanks = 4;
constexpr int kCount = 1000;
constexpr int kSteps = 100;

int main() {
    kccl::cpu::Communicator comm(kRanks, {.max_bytes = kCount * sizeof(float), .timeout_s = 10});
    const kccl::cpu::Window window(kRanks, kRanks * sizeof(int));
    std::vector<std::vector<float>> x(kRanks, std::vector<float>(kCount));

    comm.run([&](int rank) {
        const kccl::Block block = kccl::block();  // one thread
        // Opened once. Then each call costs only the exchange.
        kccl::Channel<kccl::Block> channel(block, comm.device_comm(rank));
        float* mine = x[rank].data();
        for (int step = 0; step < kSteps; ++step) {
            for (int i = 0; i < kCount; ++i) mine[i] = static_cast<float>(rank + step + i);
            if (kccl::all_reduce<float, kccl::Sum>(channel, mine, mine, kCount) != kKcclOk) break;
        }
        comm.check(rank);  // throws what went wrong

        // One-sided: a number into the window of the rank behind this one.
        const kccl::Window mine_too = window.for_kernels(rank);
        const int next = (rank + 1) % kRanks, before = (rank + kRanks - 1) % kRanks;
        kccl::put(block, comm.device_comm(rank), mine_too, next, 0, &rank, sizeof(rank));
        kccl::signal(block, comm.device_comm(rank), next, /*signal_id=*/0);
        kccl::wait(block, comm.device_comm(rank), before, /*signal_id=*/0, 1);
        comm.check(rank);
        if (*mine_too.local<int>() != before) throw kccl::cpu::Error("a wrong number arrived");
    });

    for (const std::vector<float>& sums : x) {
        for (int i = 0; i < kCount; ++i) {
            const int want = kRanks * (kRanks - 1) / 2 + kRanks * (kSteps - 1 + i);
            if (sums[i] != static_cast<float>(want)) {
                std::printf("element %d is %f, must be %d\n", i, sums[i], want);
                return 1;
            }
        }
    }
    std::printf("%d ranks: %d sums of %d floats are right\n", kRanks, kSteps, kCount);
}
