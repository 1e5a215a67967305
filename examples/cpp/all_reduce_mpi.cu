// An all-reduce inside a kernel, in a C++ program with MPI and without Python.
//
// There is one process for each GPU. MPI starts the processes, and exchanges a few hundred bytes at
// start-up. After that the kernels communicate over NVLink.
//
//     cmake -S examples/cpp -B out -Dkccl_DIR="$(kccl cmake-dir)" && cmake --build out
//     mpirun -n 2 out/all_reduce_mpi
#include <mpi.h>

#include <cstdio>
#include <cstdlib>
#include <kccl/host.hpp>
#include <kccl/kccl.cuh>
#include <vector>

constexpr int kBlocks = 4, kThreads = 128, kRounds = 1000;
constexpr int kEach = 512;  // elements of each block's message

// Every block averages its own part of x over the ranks, on a channel of its own, `rounds` times.
// The first round makes x the mean, and the others leave it so. The channel is opened once.
__global__ void average(kccl::DeviceComm comm, float* x, int rounds) {
    kccl::Channel<kccl::Block> channel(kccl::block(), comm);
    float* mine = x + blockIdx.x * kEach;
    for (int round = 0; round < rounds; ++round) {
        const kccl::Status status = kccl::all_reduce<float, kccl::Avg>(channel, mine, mine, kEach);
        if (status != kKcclOk) return;  // comm.check() tells why
    }
}

void must(cudaError_t code) {
    if (code != cudaSuccess) throw kccl::host::Error(cudaGetErrorString(code));
}

void run(int rank, int world_size) {
    int num_devices = 0;
    must(cudaGetDeviceCount(&num_devices));
    must(cudaSetDevice(rank % num_devices));
    must(cudaFree(nullptr));  // makes the device's context

    kccl::host::Team team(rank, world_size, [](const void* mine, void* all, std::size_t bytes) {
        const int count = static_cast<int>(bytes);
        MPI_Allgather(mine, count, MPI_BYTE, all, count, MPI_BYTE, MPI_COMM_WORLD);
    });
    kccl::host::Communicator comm(
        team, {.channels = kBlocks, .max_bytes = kEach * sizeof(float), .timeout_s = 20});

    std::vector<float> values(kBlocks * kEach);
    for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i + rank);
    const std::size_t bytes = values.size() * sizeof(float);
    float* x = nullptr;
    must(cudaMalloc(&x, bytes));
    must(cudaMemcpy(x, values.data(), bytes, cudaMemcpyHostToDevice));
    average<<<kBlocks, kThreads>>>(comm.device_comm(), x, kRounds);
    must(cudaGetLastError());
    must(cudaDeviceSynchronize());
    comm.check();

    must(cudaMemcpy(values.data(), x, bytes, cudaMemcpyDeviceToHost));
    for (std::size_t i = 0; i < values.size(); ++i) {
        const float want = static_cast<float>(i) + 0.5f * static_cast<float>(world_size - 1);
        if (values[i] != want)
            throw kccl::host::Error("element " + std::to_string(i) + " is wrong");
    }
    must(cudaFree(x));
    if (rank == 0)
        std::printf("%d ranks, %d blocks, %d rounds: right\n", world_size, kBlocks, kRounds);
}

int main(int argc, char** argv) {
    MPI_Init(&argc, &argv);
    int rank = 0, world_size = 0;
    MPI_Comm_rank(MPI_COMM_WORLD, &rank);
    MPI_Comm_size(MPI_COMM_WORLD, &world_size);
    try {
        run(rank, world_size);
    } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %d: %s\n", rank, error.what());
        MPI_Abort(MPI_COMM_WORLD, EXIT_FAILURE);
    }
    MPI_Finalize();
}
