// A program of NCCL's, unchanged by KCCL: ranks are processes. tests/interop/test_interop_nccl.py
// runs it with libkccl_nccl.so before the stub of NCCL, on the fake driver. It runs on GPUs, too.
//
//     LD_PRELOAD=libkccl_nccl.so ranks_of_nccl <part> [ranks]
//
// Each rank prints a line.
#include "ranks_of_nccl.hpp"

#include <cuda.h>
#include <nccl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

// ---- The parts ----------------------------------------------------------------------------------

// Only the start: the log has who makes calls.
void start(Rank&) {}

void sum(Rank& rank) {
    for (int round = 0; round < 3; ++round) {
        for (const size_t count : {1, 7, 2048, 2049, 16384, 300000, 1 << 20}) {
            all_reduce(rank, count, round, rank.comm, rank.main());
        }
        Array x(rank, 1000, round), y(rank, 1000, 50);
        MUST(ncclAllReduce(x.at, y.at, 1000, ncclFloat32, ncclSum, rank.comm, nullptr));
        y.check_sum(rank, round, "all_reduce to another array");
    }
}

// 2^18 elements take all threads that a block may have.
void bounds(Rank& rank) {
    for (const size_t count : {7, 2049, 16384, 1 << 18}) {
        all_reduce(rank, count, 0, rank.comm, rank.main());
    }
}

// Two ranks add ones of 16 bits, at an odd element.
void halves(Rank& rank) {
    const auto add = [&](ncclDataType_t type, uint16_t one, uint16_t two) {
        constexpr size_t kSize = 334;
        const Memory<uint16_t> memory(kSize);
        uint16_t* x = memory.data();
        for (size_t i = 0; i < kSize; ++i) x[i] = one;
        MUST(ncclAllReduce(x + 3, x + 3, 330, type, ncclSum, rank.comm, rank.main()));
        memory.settled();
        for (size_t i = 0; i < kSize; ++i) {
            check(x[i] == (i >= 3 && i < 333 ? two : one), "an element of 16 bits");
        }
    };
    add(ncclBfloat16, 0x3f80, 0x4000);
    add(ncclFloat16, 0x3c00, 0x4000);
}

void move(Rank& rank) {
    const int ranks = rank.world_size;
    for (int round = 0; round < 3; ++round) {
        for (const size_t count : {1, 5, 1000}) {
            Array x(rank, count, round), all(rank, count * ranks, 50);
            MUST(ncclAllGather(x.at, all.at, count, ncclFloat32, rank.comm, rank.main()));
            all.memory.settled();
            for (size_t i = 0; i < count * ranks; ++i) {
                const int source = static_cast<int>(i / count);
                check(all.at[i] == Array::value(source, i % count, round), "all_gather");
            }
            Array mine(rank, count, 50), parts(rank, count * ranks, round);
            MUST(ncclReduceScatter(parts.at, mine.at, count, ncclFloat32, ncclSum, rank.comm,
                                   rank.main()));
            mine.check_sum(rank, round, "reduce_scatter", rank.rank * count);
            for (int root = 0; root < ranks; ++root) {
                Array from(rank, count, round), to(rank, count, 50);
                const bool is_root = rank.rank == root;
                MUST(ncclBroadcast(is_root ? from.at : nullptr, to.at, count, ncclFloat32, root,
                                   rank.comm, rank.main()));
                to.memory.settled();
                for (size_t i = 0; i < count; ++i) {
                    check(to.at[i] == Array::value(root, i, round), "broadcast");
                }
                MUST(ncclBcast(from.at, count, ncclFloat32, root, rank.comm, rank.main()));
                from.memory.settled();
                check(from.at[0] == Array::value(root, 0, round), "bcast");
            }
        }
    }
}

void group(Rank& rank) {
    const ncclComm_t second = another(rank, 1);
    for (int round = 0; round < 3; ++round) {
        Array x(rank, 100, round), y(rank, 200, round), z(rank, 300, round);
        // One collective.
        MUST(ncclGroupStart());
        MUST(ncclGroupStart());
        MUST(ncclAllReduce(x.at, x.at, 100, ncclFloat32, ncclSum, rank.comm, rank.main()));
        MUST(ncclGroupEnd());
        MUST(ncclGroupEnd());
        x.check_sum(rank, round, "a group of one");
        // One of each communicator: in a group on one rank, and one by one on the others. In odd
        // rounds the second communicator comes first.
        if (rank.rank == 0) MUST(ncclGroupStart());
        for (int turn = 0; turn < 2; ++turn) {
            const bool is_second = (turn + round) % 2 == 1;
            Array& array = is_second ? z : y;
            MUST(ncclAllReduce(array.at, array.at, array.count, ncclFloat32, ncclSum,
                               is_second ? second : rank.comm, rank.main()));
        }
        if (rank.rank == 0) MUST(ncclGroupEnd());
        y.check_sum(rank, round, "the first communicator");
        z.check_sum(rank, round, "the second communicator");
        // Two of one communicator: NCCL's.
        Array u(rank, 100, round), v(rank, 200, round);
        MUST(ncclGroupStart());
        MUST(ncclAllReduce(u.at, u.at, 100, ncclFloat32, ncclSum, rank.comm, rank.main()));
        MUST(ncclAllReduce(v.at, v.at, 200, ncclFloat32, ncclSum, rank.comm, rank.main()));
        MUST(ncclGroupEnd());
        u.check_sum(rank, round, "the first of two");
        v.check_sum(rank, round, "the second of two");
    }
    MUST(ncclCommDestroy(second));
}

// A group has a collective and a message on different streams. Each waits for what the other has
// before the group, and has it behind it.
void messages(Rank& rank) {
    Array x(rank, 100, 0);
    MUST(ncclGroupStart());
    MUST(ncclAllReduce(x.at, x.at, 100, ncclFloat32, ncclSum, rank.comm, rank.main()));
    MUST(
        ncclSend(x.at, 0, ncclFloat32, (rank.rank + 1) % rank.world_size, rank.comm, rank.other()));
    MUST(ncclRecv(x.at, 0, ncclFloat32, (rank.rank + rank.world_size - 1) % rank.world_size,
                  rank.comm, rank.other()));
    MUST(ncclGroupEnd());
    x.check_sum(rank, 0, "a sum beside a message");
    check_count("waits", 3);
    // A long call is NCCL's, and has its place behind the last one.
    all_reduce(rank, 1 << 20, 1, rank.comm, rank.other());
    check_count("waits", 4);
    all_reduce(rank, 100, 2, rank.comm, rank.main());
    check_count("waits", 5);
}

void streams(Rank& rank) {
    for (int round = 0; round < 4; ++round) {
        all_reduce(rank, 100, round, rank.comm, rank.main());
        all_reduce(rank, 100, round, rank.comm, rank.main());
        all_reduce(rank, 100, round, rank.comm, rank.other());
    }
    // A stream waits where the call before was on the other one.
    check_count("waits", 7);
}

void several(Rank& rank) {
    const ncclComm_t second = another(rank, 1), third = another(rank, 2);
    ncclComm_t part = nullptr, none = nullptr;
    MUST(ncclCommSplit(rank.comm, 0, -rank.rank, &part, nullptr));
    MUST(ncclCommSplit(rank.comm, rank.rank == 0 ? NCCL_SPLIT_NOCOLOR : 1, 0, &none, nullptr));
    check((none == nullptr) == (rank.rank == 0), "a rank without a part");
    for (int round = 0; round < 3; ++round) {
        for (const ncclComm_t comm : {rank.comm, second, part, third}) {
            all_reduce(rank, 500, round, comm, rank.main());
        }
    }
    if (none != nullptr) MUST(ncclCommDestroy(none));
    MUST(ncclCommAbort(second));
    all_reduce(rank, 500, 7, part, rank.main());
    MUST(ncclCommDestroy(part));
    all_reduce(rank, 500, 8, third, rank.main());
    MUST(ncclCommFinalize(third));
    MUST(ncclCommDestroy(third));
}

void wrong(Rank& rank) {
    const Memory<float> memory(4);
    float* x = memory.data();
    const auto refused = [&](ncclResult_t result, const std::string& words) {
        check(result == ncclInvalidArgument, "the result of a wrong call");
        for (const ncclComm_t comm : {rank.comm, ncclComm_t{}}) {
            check(ncclGetLastError(comm) == words, "the words of a wrong call");
        }
    };
    refused(ncclAllReduce(nullptr, x, 4, ncclFloat32, ncclSum, rank.comm, rank.main()),
            "an array is null");
    refused(ncclBroadcast(x, x, 4, ncclFloat32, 8, rank.comm, rank.main()),
            "there is no such root");
    MUST(ncclAllReduce(nullptr, nullptr, 0, ncclFloat32, ncclSum, rank.comm, rank.main()));
    all_reduce(rank, 10, 0, rank.comm, rank.main());
}

// Makes a call that no other rank makes, and waits for its end.
void call_alone(const Rank& rank, const Memory<float>& x) {
    const auto result =
        ncclAllReduce(x.data(), x.data(), 4, ncclFloat32, ncclSum, rank.comm, rank.main());
    // The fake driver's kernels have ended when a launch returns.
    check(result == ncclSuccess || result == ncclRemoteError, "the result of a call that fails");
    x.settled();
}

// Says what the communicator says about a call that has failed.
void tell_error(const Rank& rank, const Memory<float>& x) {
    ncclResult_t error = ncclSuccess;
    MUST(ncclCommGetAsyncError(rank.comm, &error));
    check(error == ncclRemoteError, "the communicator's error");
    const std::string words = ncclGetLastError(rank.comm);
    check(ncclGetLastError(nullptr) == words, "the words without a communicator");
    std::printf("rank %d: %s\n", rank.rank, words.c_str());
    std::fflush(stdout);
    const auto next =
        ncclAllReduce(x.data(), x.data(), 4, ncclFloat32, ncclSum, rank.comm, rank.main());
    check(next == ncclRemoteError, "the call after");
}

// One rank never comes, and the limit of KCCL_TIMEOUT ends the other's wait.
void late(Rank& rank) {
    all_reduce(rank, 10, 0, rank.comm, rank.main());
    if (rank.rank == 0) {
        const Memory<float> x(4);
        call_alone(rank, x);
        tell_error(rank, x);
    }
    rank.barrier();
    MUST(ncclCommAbort(std::exchange(rank.comm, nullptr)));
}

// Another thread aborts a call that waits.
void abort(Rank& rank) {
    all_reduce(rank, 10, 0, rank.comm, rank.main());
    if (rank.rank == 0) {
        ncclResult_t error = ncclRemoteError;
        std::thread watchdog([&] {
            std::this_thread::sleep_for(std::chrono::milliseconds(200));
            ncclCommGetAsyncError(rank.comm, &error);
            ncclCommAbort(rank.comm);
        });
        call_alone(rank, Memory<float>(4));
        watchdog.join();
        check(error == ncclSuccess, "a call that waits is no error");
        rank.comm = nullptr;
    }
    rank.barrier();
}

const std::map<std::string, std::function<void(Rank&)>> kParts = {
    {"messages", messages}, {"graphs", graphs},   {"held", held},   {"sum", sum},
    {"halves", halves},     {"move", move},       {"group", group}, {"graph", graph},
    {"streams", streams},   {"wrong", wrong},     {"late", late},   {"abort", abort},
    {"several", several},   {"refused", refused}, {"start", start}, {"orders", orders},
    {"bounds", bounds},
};

int run(const std::string& part, Rank rank) {
    try {
        CUdevice device;
        CUcontext context;
        int devices = 1;
        MUST(cuInit(0));
        MUST(cuDeviceGetCount(&devices));
        MUST(cuDeviceGet(&device, rank.rank % devices));
        MUST(cuDevicePrimaryCtxRetain(&context, device));
        MUST(cuCtxPushCurrent(context));
        MUST(cuStreamCreate(&rank.stream, CU_STREAM_NON_BLOCKING));
        MUST(cuStreamCreate(&rank.other_stream, CU_STREAM_NON_BLOCKING));
        // NCCL's numbers are made by a process that stays, behind the fork.
        if (rank.rank == 0) {
            for (ncclUniqueId& id : rank.shared->ids) MUST(ncclGetUniqueId(&id));
        }
        rank.barrier();
        MUST(ncclCommInitRank(&rank.comm, rank.world_size, rank.shared->ids[0], rank.rank));
        kParts.at(part)(rank);
        if (rank.comm != nullptr) MUST(ncclCommDestroy(rank.comm));
        cuStreamDestroy(rank.stream);
        cuStreamDestroy(rank.other_stream);
        std::printf("rank %d: right\n", rank.rank);
    } catch (const std::exception& error) {
        std::printf("rank %d: wrong: %s\n", rank.rank, error.what());
        return 1;
    }
    return 0;
}

}  // namespace

int main(int count, char** arguments) {
    const int world_size = count > 2 ? std::atoi(arguments[2]) : 2;
    void* memory =
        mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    auto* shared = new (memory) Shared{};
    std::vector<pid_t> ranks;
    for (int rank = 0; rank < world_size; ++rank) {
        const pid_t process = fork();
        if (process == 0) {
            // No rank outlives a program whose time is up.
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            // fake_cuda.cpp asks for it.
            setenv("PMI_RANK", std::to_string(rank).c_str(), 1);
            const int code = run(arguments[1], {rank, world_size, shared});
            std::exit(code);
        }
        ranks.push_back(process);
    }
    int failed = 0, status = 0;
    for (pid_t ended; (ended = wait(&status)) > 0;) {
        std::erase(ranks, ended);
        // The others may wait for a rank that has failed.
        if (status != 0 && failed == 0) {
            for (const pid_t each : ranks) kill(each, SIGKILL);
        }
        failed |= status;
    }
    return failed != 0;
}
