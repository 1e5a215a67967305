// A stub of NCCL, for libkccl_nccl.so: ranks are processes, which exchange through memory of the
// CPU, and a call does its work at once. It has what the tests call. Each call that moves data is a
// line on standard error.
#include <cuda.h>
#include <fcntl.h>
#include <nccl.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

namespace {

constexpr int kMostRanks = 8;
constexpr size_t kMostBytes = size_t{16} << 20;

// What the ranks of a communicator share; zero at first.
struct Shared {
    std::atomic<int> arrived, rounds;
    char data[kMostRanks][kMostBytes];
};

}  // namespace

struct ncclComm {
    int rank, world_size, device;
    int splits = 0;
    std::string name;
    Shared* shared;
};

namespace {

void barrier(ncclComm* comm) {
    const int round = comm->shared->rounds.load();
    if (comm->shared->arrived.fetch_add(1) == comm->world_size - 1) {
        comm->shared->arrived = 0;
        ++comm->shared->rounds;
        return;
    }
    while (comm->shared->rounds.load() == round) sched_yield();
}

ncclComm* open_comm(const std::string& name, int world_size, int rank, int device) {
    const int fd = shm_open(name.c_str(), O_CREAT | O_RDWR, 0600);
    if (fd < 0 || ftruncate(fd, sizeof(Shared)) != 0) return nullptr;
    void* memory = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    int devices = 1;
    cuDeviceGetCount(&devices);
    auto* shared = static_cast<Shared*>(memory);
    auto* comm = new ncclComm{rank, world_size, device % devices, 0, name, shared};
    barrier(comm);
    shm_unlink(name.c_str());
    return comm;
}

size_t bytes_of(ncclDataType_t type) {
    constexpr size_t kBytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2};
    return kBytes[type];
}

void say(const ncclComm* comm, const char* name) {
    std::fprintf(stderr, "NCCL: rank %d: %s\n", comm->rank, name);
}

std::string last_error;

ncclResult_t refuse(const char* why) {
    last_error = why;
    return ncclInvalidArgument;
}

// Copies to or from memory of the GPU.
void copy(void* to, const void* from, size_t num_bytes) {
    cuMemcpy(reinterpret_cast<CUdeviceptr>(to), reinterpret_cast<CUdeviceptr>(from), num_bytes);
}

// Shows every rank all ranks' bytes: use(rank, bytes) for each rank.
template <class Use>
ncclResult_t exchange(ncclComm* comm, const void* mine, size_t num_bytes, Use use) {
    if (num_bytes > kMostBytes) return ncclInternalError;
    // What comes before on any stream has to come first.
    cuCtxSynchronize();
    copy(comm->shared->data[comm->rank], mine, num_bytes);
    barrier(comm);
    for (int rank = 0; rank < comm->world_size; ++rank) use(rank, comm->shared->data[rank]);
    barrier(comm);
    return ncclSuccess;
}

// Adds floats, from element `first` on. Sums of other types are not needed.
ncclResult_t sum(ncclComm* comm, const void* in, void* out, size_t all, size_t first,
                 size_t count) {
    std::vector<float> sums(count);
    const auto result = exchange(comm, in, all * sizeof(float), [&](int, const char* bytes) {
        for (size_t i = 0; i < count; ++i) {
            float x;
            std::memcpy(&x, bytes + (first + i) * sizeof(float), sizeof(x));
            sums[i] += x;
        }
    });
    copy(out, sums.data(), count * sizeof(float));
    return result;
}

}  // namespace

extern "C" {

ncclResult_t ncclGetVersion(int* version) {
    *version = NCCL_VERSION_CODE;
    return ncclSuccess;
}
const char* ncclGetErrorString(ncclResult_t result) {
    return result == ncclSuccess ? "no error" : "an error of the stub";
}
// As in NCCL, the words are those of the process.
const char* ncclGetLastError(ncclComm_t) { return last_error.c_str(); }

ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
    static std::atomic<int> number = 0;
    std::snprintf(id->internal, sizeof(id->internal), "/stub-nccl-%d-%d",
                  static_cast<int>(getpid()), number++);
    return ncclSuccess;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int world_size, ncclUniqueId id, int rank,
                                    ncclConfig_t*) {
    *comm = open_comm(id.internal, world_size, rank, rank);
    return *comm != nullptr ? ncclSuccess : ncclSystemError;
}
ncclResult_t ncclCommInitRank(ncclComm_t* comm, int world_size, ncclUniqueId id, int rank) {
    return ncclCommInitRankConfig(comm, world_size, id, rank, nullptr);
}
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* made, ncclConfig_t*) {
    const int mine[2] = {color, key};
    int rank = 0, world_size = 0;
    const auto result = exchange(comm, mine, sizeof(mine), [&](int peer, const char* bytes) {
        int theirs[2];
        std::memcpy(theirs, bytes, sizeof(theirs));
        if (theirs[0] != color) return;
        ++world_size;
        rank += theirs[1] < key || (theirs[1] == key && peer < comm->rank);
    });
    const std::string name =
        comm->name + "-" + std::to_string(++comm->splits) + "-" + std::to_string(color);
    *made = color < 0 ? nullptr : open_comm(name, world_size, rank, comm->device);
    return result;
}
ncclResult_t ncclCommFinalize(ncclComm_t) { return ncclSuccess; }
ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    munmap(comm->shared, sizeof(Shared));
    delete comm;
    return ncclSuccess;
}
ncclResult_t ncclCommAbort(ncclComm_t comm) { return ncclCommDestroy(comm); }
ncclResult_t ncclCommGetAsyncError(ncclComm_t, ncclResult_t* error) {
    *error = ncclSuccess;
    return ncclSuccess;
}
ncclResult_t ncclCommCount(ncclComm_t comm, int* count) {
    *count = comm->world_size;
    return ncclSuccess;
}
ncclResult_t ncclCommCuDevice(ncclComm_t comm, int* device) {
    *device = comm->device;
    return ncclSuccess;
}
ncclResult_t ncclCommUserRank(ncclComm_t comm, int* rank) {
    *rank = comm->rank;
    return ncclSuccess;
}
ncclResult_t ncclGroupStart() { return ncclSuccess; }
ncclResult_t ncclGroupEnd() { return ncclSuccess; }

ncclResult_t ncclAllReduce(const void* in, void* out, size_t count, ncclDataType_t type,
                           ncclRedOp_t, ncclComm_t comm, cudaStream_t) {
    say(comm, "ncclAllReduce");
    if (count != 0 && (in == nullptr || out == nullptr)) return refuse("an array is null");
    if (type != ncclFloat32) return refuse("the stub adds floats");
    return sum(comm, in, out, count, 0, count);
}
ncclResult_t ncclReduceScatter(const void* in, void* out, size_t count, ncclDataType_t type,
                               ncclRedOp_t, ncclComm_t comm, cudaStream_t) {
    say(comm, "ncclReduceScatter");
    if (type != ncclFloat32) return refuse("the stub adds floats");
    return sum(comm, in, out, count * comm->world_size, count * comm->rank, count);
}
ncclResult_t ncclAllGather(const void* in, void* out, size_t count, ncclDataType_t type,
                           ncclComm_t comm, cudaStream_t) {
    say(comm, "ncclAllGather");
    const size_t num_bytes = count * bytes_of(type);
    return exchange(comm, in, num_bytes, [&](int rank, const char* bytes) {
        copy(static_cast<char*>(out) + rank * num_bytes, bytes, num_bytes);
    });
}
ncclResult_t ncclBroadcast(const void* in, void* out, size_t count, ncclDataType_t type, int root,
                           ncclComm_t comm, cudaStream_t) {
    say(comm, "ncclBroadcast");
    if (root < 0 || root >= comm->world_size) return refuse("there is no such root");
    const size_t num_bytes = count * bytes_of(type);
    const void* mine = comm->rank == root ? in : out;
    return exchange(comm, mine, num_bytes, [&](int rank, const char* bytes) {
        if (rank == root) copy(out, bytes, num_bytes);
    });
}

// The stub moves no messages.
ncclResult_t ncclSend(const void*, size_t, ncclDataType_t, int, ncclComm_t comm, cudaStream_t) {
    say(comm, "ncclSend");
    return ncclSuccess;
}
ncclResult_t ncclRecv(void*, size_t, ncclDataType_t, int, ncclComm_t comm, cudaStream_t) {
    say(comm, "ncclRecv");
    return ncclSuccess;
}

ncclResult_t ncclBcast(void* buffer, size_t count, ncclDataType_t type, int root, ncclComm_t comm,
                       cudaStream_t stream) {
    return ncclBroadcast(buffer, buffer, count, type, root, comm, stream);
}

}  // extern "C"
