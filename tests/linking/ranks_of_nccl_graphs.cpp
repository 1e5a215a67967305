// The parts of ranks_of_nccl.cpp with CUDA graphs.
#include <cuda.h>
#include <nccl.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>

#include "ranks_of_nccl.hpp"

void graph(Rank& rank) {
    Array x(rank, 2048, 0), y(rank, 100, 0), z(rank, 100, 0), w(rank, 300, 0), v(rank, 2048, 0);
    const auto add = [&](const Array& array, cudaStream_t stream) {
        MUST(ncclAllReduce(array.at, array.at, array.count, ncclFloat32, ncclSum, rank.comm,
                           stream));
    };
    CUgraph captured;
    CUgraphExec made;
    CUevent event;
    MUST(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    const auto wait = [&](CUstream one, CUstream other) {
        MUST(cuEventRecord(event, other));
        MUST(cuStreamWaitEvent(one, event, 0));
    };
    MUST(cuStreamBeginCapture(rank.stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    wait(rank.other_stream, rank.stream);
    add(x, rank.main());
    add(y, rank.main());
    MUST(ncclBroadcast(y.at, z.at, 100, ncclFloat32, 0, rank.comm, rank.main()));
    add(z, rank.main());
    check_count("changes of edges", 0);
    // Nothing else orders the two streams.
    add(w, rank.other());
    add(y, rank.main());
    check_count("changes of edges", 2);
    // As in PyTorch: the stream of the calls and another one wait for each other. The second call
    // of the two is behind a copy that is behind the first.
    wait(rank.other_stream, rank.stream);
    add(w, rank.other());
    wait(rank.stream, rank.other_stream);
    MUST(cuMemcpyDtoDAsync(reinterpret_cast<CUdeviceptr>(v.at), reinterpret_cast<CUdeviceptr>(x.at),
                           x.count * sizeof(float), rank.stream));
    wait(rank.other_stream, rank.stream);
    add(x, rank.other());
    check_count("changes of edges", 4);
    wait(rank.stream, rank.other_stream);
    MUST(cuStreamEndCapture(rank.stream, &captured));
    MUST(cuGraphInstantiate(&made, captured, 0));
    // A call is a dependent if it has one edge, from a call. A root's broadcast ends with a copy.
    check_count("dependents", rank.rank == 0 ? 5 : 6);
    for (int round = 0; round < 5; ++round) {
        for (Array* each : {&x, &y, &z, &w}) each->fill(rank, round);
        MUST(cuGraphLaunch(made, rank.stream));
        v.check_sum(rank, round, "a call in a graph");
        all_reduce(rank, 50, round, rank.comm, rank.main());
        y.memory.settled();
        const auto ranks = static_cast<float>(rank.world_size);
        float sum = 0;
        for (int each = 0; each < rank.world_size; ++each) sum += Array::value(each, 3, round);
        check(x.at[3] == ranks * sum, "two calls around a copy in a graph");
        check(y.at[3] == ranks * sum, "two calls in a graph");
        check(z.at[3] == ranks * sum, "a call behind a broadcast in a graph");
        check(w.at[3] == ranks * sum, "two calls of another stream in a graph");
    }
    cuEventDestroy(event);
}

namespace {

void sum(const Array& array, ncclComm_t comm, CUstream stream) {
    MUST(ncclAllReduce(array.at, array.at, array.count, ncclFloat32, ncclSum, comm,
                       reinterpret_cast<cudaStream_t>(stream)));
}

CUgraphExec captured_sum(const Array& array, ncclComm_t comm, CUstream stream, int calls = 3) {
    CUgraph captured;
    CUgraphExec made;
    MUST(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    for (int call = 0; call < calls; ++call) sum(array, comm, stream);
    MUST(cuStreamEndCapture(stream, &captured));
    MUST(cuGraphInstantiate(&made, captured, 0));
    return made;
}

}  // namespace

// Two graphs of one communicator run on two streams.
void graphs(Rank& rank) {
    Array x(rank, 100, 0), y(rank, 100, 0);
    const CUgraphExec one = captured_sum(x, rank.comm, rank.stream);
    const CUgraphExec other = captured_sum(y, rank.comm, rank.other_stream);
    check_count("open launches", 0);
    for (int round = 0; round < 20; ++round) {
        x.fill(rank, round);
        y.fill(rank, round + 1);
        MUST(cuGraphLaunch(one, rank.stream));
        MUST(cuGraphLaunch(other, rank.other_stream));
        x.memory.settled();
        const auto ranks = static_cast<float>(rank.world_size);
        float sum = 0, other_sum = 0;
        for (int each = 0; each < rank.world_size; ++each) {
            sum += Array::value(each, 3, round);
            other_sum += Array::value(each, 3, round + 1);
        }
        check(x.at[3] == ranks * ranks * sum, "the first of two graphs");
        check(y.at[3] == ranks * ranks * other_sum, "the second of two graphs");
    }
}

// The ranks begin long calls of two communicators in different orders: one by one, and in graphs.
// Only GPUs can: the fake driver ends a call before the next one begins.
void orders(Rank& rank) {
    const ncclComm_t second = another(rank, 1);
    constexpr int kCalls = 20;
    constexpr size_t kCount = 1 << 18;  // 1 MiB
    const Array x(rank, kCount, 0), y(rank, kCount, 0);
    const CUgraphExec one = captured_sum(x, rank.comm, rank.stream, kCalls);
    const CUgraphExec other = captured_sum(y, second, rank.other_stream, kCalls);
    const bool is_reversed = rank.rank % 2 == 1;
    const auto both = [&](auto begin_one, auto begin_other) {
        for (const Array* each : {&x, &y}) {
            std::fill_n(each->at, kCount, 0.0f);
            each->at[0] = 1;
            each->at[kCount - 1] = 2;
        }
        rank.barrier();
        if (is_reversed) begin_other();
        begin_one();
        if (!is_reversed) begin_other();
        MUST(cuCtxSynchronize());
    };
    const auto is_right = [&](int calls) {
        float power = 1;
        for (int call = 0; call < calls; ++call) power *= static_cast<float>(rank.world_size);
        for (const Array* each : {&x, &y}) {
            check(each->at[0] == power && each->at[1] == 0 && each->at[kCount - 1] == 2 * power,
                  "a sum of calls in different orders");
        }
    };
    for (int round = 0; round < 20; ++round) {
        both([&] { sum(x, rank.comm, rank.stream); }, [&] { sum(y, second, rank.other_stream); });
        is_right(1);
        both([&] { MUST(cuGraphLaunch(one, rank.stream)); },
             [&] { MUST(cuGraphLaunch(other, rank.other_stream)); });
        is_right(kCalls);
    }
    MUST(ncclCommDestroy(second));
}

// A graph that fails does not end until its rank aborts.
void held(Rank& rank) {
    Array x(rank, 100, 0);
    const CUgraphExec made = captured_sum(x, rank.comm, rank.stream);
    MUST(cuGraphLaunch(made, rank.stream));
    x.memory.settled();
    rank.barrier();
    if (rank.rank == 0) {
        std::atomic<bool> has_ended = false, has_ended_early = false;
        std::thread watchdog([&] {
            // The graph fails after that time.
            const double limit_s = std::strtod(std::getenv("KCCL_TIMEOUT"), nullptr);
            std::this_thread::sleep_for(std::chrono::duration<double>(limit_s + 1));
            has_ended_early = has_ended.load();
            ncclCommAbort(rank.comm);
        });
        MUST(cuGraphLaunch(made, rank.stream));
        x.memory.settled();
        has_ended = true;
        watchdog.join();
        check(!has_ended_early, "a graph that failed has ended");
        rank.comm = nullptr;
    }
    rank.barrier();
}

// A launch fails, because its capture is lost.
void refused(Rank& rank) {
    const Memory<float> memory(4);
    float* x = memory.data();
    CUgraph captured;
    unsigned long long number;
    MUST(cuStreamBeginCapture(rank.stream, CU_STREAM_CAPTURE_MODE_GLOBAL));
    check(cuStreamGetId(rank.stream, &number) == CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
          "a question that ends a capture");
    check(ncclAllReduce(x, x, 4, ncclFloat32, ncclSum, rank.comm, rank.main()) ==
              ncclUnhandledCudaError,
          "the result of a launch that fails");
    const std::string words =
        "all_reduce_one_shot_ll16 was not launched: CUDA_ERROR_STREAM_CAPTURE_INVALIDATED (901)";
    const auto unknown = reinterpret_cast<ncclComm_t>(&captured);
    for (const ncclComm_t comm : {rank.comm, unknown, ncclComm_t{}}) {
        check(ncclGetLastError(comm) == words, ncclGetLastError(comm));
    }
    check(cuStreamEndCapture(rank.stream, &captured) == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
          "the end of a capture that is lost");
    check(ncclBroadcast(x, x, 4, ncclFloat32, 8, rank.comm, rank.main()) == ncclInvalidArgument,
          "the result of a wrong call");
    check(ncclGetLastError(nullptr) != words, "NCCL's words after KCCL's");
    all_reduce(rank, 4, 0, rank.comm, rank.main());
}
