// host.hpp between processes of MPI, with the fake driver of fake_cuda.cpp. The library's calls,
// compiled for the CPU, use its windows and its DeviceComm. Each rank prints its result as a line.
//
//     mpirun -n 3 ranks_on_cpus sum | late | long | throw | differ | window | empty | number
#include <mpi.h>
#include <sched.h>
#include <time.h>

#include <cstdio>
#include <kccl/host.hpp>
#include <kccl/kccl.cuh>
#include <string>

extern "C" {
uint64_t kccl_host_clock_ns() {
    timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<uint64_t>(now.tv_sec) * 1'000'000'000 + static_cast<uint64_t>(now.tv_nsec);
}
int kccl_host_read_peer(uint64_t, int, void*, uint64_t, uint64_t) { return -1; }
int kccl_host_may_read_peer(uint64_t, int) { return 0; }
uint32_t kccl_host_idle(uint64_t, uint64_t, uint32_t, uint32_t* gone) {
    sched_yield();
    *gone = 0;
    return kKcclOk;
}
}

constexpr int kChannels = 3;
constexpr uint64_t kMaxBytes = 1000;

static void say(int rank, const std::string& what) {
    std::printf("rank %d: %s\n", rank, what.c_str());
    std::fflush(stdout);
}

static void gather(const void* mine, void* all, std::size_t num_bytes) {
    const int count = static_cast<int>(num_bytes);
    MPI_Allgather(mine, count, MPI_BYTE, all, count, MPI_BYTE, MPI_COMM_WORLD);
}

static kccl::Status sum(const KcclDeviceComm& comm, int channel, uint64_t count) {
    float x[300];
    for (int round = 0; round < 100; ++round) {
        for (uint64_t i = 0; i < count; ++i) {
            x[i] = static_cast<float>((comm.rank + 1) * round) + static_cast<float>(i);
        }
        const kccl::Status status = kccl::all_reduce(kccl::block(), comm, x, x, count, channel);
        if (status != kKcclOk) {
            // On a GPU the kernel does this.
            auto* state = reinterpret_cast<KcclState*>(comm.state);
            auto* mailbox = reinterpret_cast<KcclMailbox*>(state->idle_context);
            mailbox->record = state->record;
            mailbox->status = state->status;
            return status;
        }
        const int ranks = comm.world_size;
        for (uint64_t i = 0; i < count; ++i) {
            const float want = static_cast<float>(ranks * (ranks + 1) / 2 * round) +
                               static_cast<float>(ranks) * static_cast<float>(i);
            if (x[i] != want) throw kccl::host::Error("wrong sum");
        }
    }
    return kKcclOk;
}

static void run(const std::string& part, int rank, int world_size) {
    kccl::host::Team team(part == "number" ? rank + 1 : rank, world_size, gather);
    if (part == "window") {
        // Every rank writes into the next rank's window.
        const kccl::host::Window window(team, 100, 10);
        const auto place = [&](int of) { return reinterpret_cast<int*>(window.address(of)); };
        const kccl::Window in_kernel = window.for_kernels();
        if (in_kernel.num_bytes != window.num_bytes() || in_kernel.local<int>() != place(rank) ||
            in_kernel.at<int>(world_size - 1, 8) != place(world_size - 1) + 2) {
            return say(rank, "the kernel's window is another");
        }
        const bool was_zero = *place(rank) == 0 && window.num_bytes() >= 100;
        MPI_Barrier(MPI_COMM_WORLD);
        *place((rank + 1) % world_size) = 1 + rank;
        MPI_Barrier(MPI_COMM_WORLD);
        const int from = (rank + world_size - 1) % world_size;
        return say(rank, was_zero && *place(rank) == 1 + from ? "right" : "wrong");
    }
    if (part == "empty") kccl::host::Window(team, 0, 10);
    const bool differs = part == "differ" && rank == 1;
    kccl::host::Communicator comm(
        team, {.channels = kChannels, .max_bytes = kMaxBytes + differs, .timeout_s = 0.5});
    const KcclDeviceComm& device_comm = comm.device_comm();
    if (part == "throw" && rank == 1) throw kccl::host::Error("on purpose");
    if (part == "late" && rank == 1) {
        MPI_Barrier(MPI_COMM_WORLD);
        return say(rank, "came late");
    }
    if (part == "long") {
        sum(device_comm, 0, 300);
    } else {
        for (int channel = 0; channel < kChannels; ++channel)
            sum(device_comm, channel, 250 - channel);
    }
    if (part == "late") MPI_Barrier(MPI_COMM_WORLD);
    comm.check();
    say(rank, "right");
}

int main(int, char** arguments) {
    MPI_Init(nullptr, nullptr);
    int rank = 0, world_size = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world_size);
    try {
        run(arguments[1], rank, world_size);
    } catch (const std::exception& error) {
        say(rank, error.what());
    }
    MPI_Finalize();
}
