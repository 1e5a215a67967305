// What the parts of ranks_of_nccl.cpp use: a rank, and arrays that the CPU and the GPU use.
#pragma once

#include <cuda.h>
#include <nccl.h>

#include <atomic>
#include <cstddef>
#include <stdexcept>
#include <string>
#include <thread>

// Only the fake driver has it.
extern "C" __attribute__((weak)) int fake_cuda_count(const char* what);

// What the ranks share beside NCCL.
struct Shared {
    ncclUniqueId ids[4];
    std::atomic<int> arrived, rounds;
};

struct Rank {
    int rank, world_size;
    Shared* shared;
    ncclComm_t comm = nullptr;
    CUstream stream = nullptr, other_stream = nullptr;

    cudaStream_t main() const { return reinterpret_cast<cudaStream_t>(stream); }
    cudaStream_t other() const { return reinterpret_cast<cudaStream_t>(other_stream); }
    void barrier() const {
        const int round = shared->rounds.load();
        if (shared->arrived.fetch_add(1) == world_size - 1) {
            shared->arrived = 0;
            ++shared->rounds;
            return;
        }
        while (shared->rounds.load() == round) std::this_thread::yield();
    }
};

#define MUST(call) must(call, #call)

inline void must(ncclResult_t result, const char* what) {
    if (result == ncclSuccess) return;
    const std::string error = ncclGetErrorString(result), words = ncclGetLastError(nullptr);
    throw std::runtime_error(std::string(what) + " failed: " + error + ": " + words);
}
inline void check(bool is_right, const std::string& what) {
    if (!is_right) throw std::runtime_error(what);
}

inline void must(CUresult result, const char* what) {
    if (result != CUDA_SUCCESS) {
        throw std::runtime_error(std::string(what) + " failed: " + std::to_string(result));
    }
}

inline void check_count(const char* what, int wanted) {
    if (fake_cuda_count == nullptr) return;
    const int count = fake_cuda_count(what);
    check(count == wanted, std::to_string(count) + " " + what);
}

// Memory that the CPU and the GPU use.
template <class T>
class Memory {
  public:
    explicit Memory(size_t count) {
        MUST(cuMemAllocManaged(&address_, count * sizeof(T), CU_MEM_ATTACH_GLOBAL));
    }
    ~Memory() { cuMemFree(address_); }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    T* data() const { return reinterpret_cast<T*>(address_); }
    // Waits for what the GPU does.
    T* settled() const {
        MUST(cuCtxSynchronize());
        return data();
    }

  private:
    CUdeviceptr address_ = 0;
};

// An array whose elements differ between ranks and rounds, at an address that does, too.
struct Array {
    Array(const Rank& rank, size_t count, int round)
        : memory(count + 16), at(memory.data() + rank.rank), count(count) {
        fill(rank, round);
    }
    void fill(const Rank& rank, int round) {
        memory.settled();
        for (size_t i = 0; i < count; ++i) at[i] = value(rank.rank, i, round);
    }
    static float value(int rank, size_t i, int round) {
        return static_cast<float>((rank + 1) * (round + 1)) + static_cast<float>(i % 1000);
    }
    void check_sum(const Rank& rank, int round, const std::string& what, size_t first = 0) const {
        memory.settled();
        for (size_t i = 0; i < count; ++i) {
            float want = 0;
            for (int each = 0; each < rank.world_size; ++each)
                want += value(each, first + i, round);
            check(at[i] == want, what + ": element " + std::to_string(i));
        }
    }
    Memory<float> memory;
    float* at;
    size_t count;
};

inline ncclComm_t another(const Rank& rank, int number) {
    ncclComm_t comm = nullptr;
    MUST(ncclCommInitRank(&comm, rank.world_size, rank.shared->ids[number], rank.rank));
    return comm;
}

inline void all_reduce(const Rank& rank, size_t count, int round, ncclComm_t comm,
                       cudaStream_t stream) {
    Array x(rank, count, round);
    MUST(ncclAllReduce(x.at, x.at, count, ncclFloat32, ncclSum, comm, stream));
    x.check_sum(rank, round, "all_reduce of " + std::to_string(count));
}

// The parts with graphs.
void graph(Rank& rank);
void graphs(Rank& rank);
void held(Rank& rank);
void orders(Rank& rank);
void refused(Rank& rank);
