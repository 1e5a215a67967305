// host.hpp between two GPUs. One rank's kernel makes a call that the other rank never makes, and
// the error says why the call failed. Then an exception on one rank ends its communicator, and the
// other rank's kernel ends at once.
#include <mpi.h>

#include <cstdio>
#include <kccl/host.hpp>
#include <kccl/kccl.cuh>
#include <string>

__global__ void sum(kccl::DeviceComm comm, float* x, int rounds) {
    kccl::Channel<kccl::Block> channel(kccl::block(), comm);
    for (int round = 0; round < rounds; ++round) {
        if (kccl::all_reduce(channel, x, x, 64) != kKcclOk) return;
    }
}

static void gather(const void* mine, void* all, std::size_t num_bytes) {
    const int count = static_cast<int>(num_bytes);
    MPI_Allgather(mine, count, MPI_BYTE, all, count, MPI_BYTE, MPI_COMM_WORLD);
}

static void call(const kccl::host::Communicator& comm, int rounds) {
    float* x = nullptr;
    cudaMalloc(&x, 64 * sizeof(float));
    sum<<<1, 32>>>(comm.device_comm(), x, rounds);
    cudaDeviceSynchronize();
    comm.check();
}

static void say(int rank, const std::string& what) {
    std::printf("rank %d: %s\n", rank, what.c_str());
    std::fflush(stdout);
}

int main() {
    MPI_Init(nullptr, nullptr);
    int rank = 0, world_size = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world_size);
    cudaSetDevice(rank);
    cudaFree(nullptr);
    kccl::host::Team team(rank, world_size, gather);
    try {
        kccl::host::Communicator comm(team, {.channels = 1, .max_bytes = 256, .timeout_s = 0.5});
        call(comm, 10);
        if (rank == 0) call(comm, 1);
        MPI_Barrier(MPI_COMM_WORLD);
        say(rank, "did not wait");
    } catch (const kccl::host::Failure& failure) {
        say(rank, failure.what());
        MPI_Barrier(MPI_COMM_WORLD);
    }
    try {
        kccl::host::Communicator comm(team, {.channels = 1, .max_bytes = 256, .timeout_s = 60});
        call(comm, 10);
        if (rank == 1) throw kccl::host::Error("on purpose");
        call(comm, 1);
    } catch (const kccl::host::Error& error) {
        say(rank, error.what());
    }
    MPI_Finalize();
}
