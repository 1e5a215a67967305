// The functions of NCCL's that this library answers. It hands on all others (forwards.inc, which
// the build writes from nccl.h).
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>

#include "calls.h"
#include "real.h"

using kccl::nccl::Call;
using kccl::nccl::Collective;

namespace {

// Tells whether functions that make a communicator wait for it: as NCCL says it, the environment
// comes before what the program says. The ranks must all say the same.
bool is_blocking(const ncclConfig_t* config, bool by_default = true) {
    const char* told = std::getenv("NCCL_COMM_BLOCKING");
    if (told != nullptr && std::strcmp(told, "0") == 0) return false;
    if (told != nullptr && std::strcmp(told, "1") == 0) return true;
    if (config != nullptr && config->blocking != NCCL_CONFIG_UNDEF_INT)
        return config->blocking != 0;
    return by_default;
}

// Tells whether the environment is right, before anything is sent.
bool has_right_environment() {
    const std::string error = kccl::nccl::wrong_environment();
    if (error.empty()) return true;
    std::fprintf(stderr, "kccl: %s\n", error.c_str());
    kccl::nccl::own_error() = error;
    return false;
}

CUstream stream_of(cudaStream_t stream) { return reinterpret_cast<CUstream>(stream); }

}  // namespace

extern "C" {

// ---- Communicators ------------------------------------------------------------------------------

ncclResult_t ncclCommInitRank(ncclComm_t* comm, int world_size, ncclUniqueId id, int rank) {
    if (!has_right_environment()) return ncclInvalidUsage;
    const ncclResult_t result = KCCL_REAL(ncclCommInitRank, comm, world_size, id, rank);
    return kccl::nccl::made(result, comm, is_blocking(nullptr));
}

ncclResult_t ncclCommInitRankConfig(ncclComm_t* comm, int world_size, ncclUniqueId id, int rank,
                                    ncclConfig_t* config) {
    if (!has_right_environment()) return ncclInvalidUsage;
    const ncclResult_t result =
        KCCL_REAL(ncclCommInitRankConfig, comm, world_size, id, rank, config);
    return kccl::nccl::made(result, comm, is_blocking(config));
}

#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 23, 0)
ncclResult_t ncclCommInitRankScalable(ncclComm_t* made_comm, int world_size, int rank, int num_ids,
                                      ncclUniqueId* ids, ncclConfig_t* config) {
    if (!has_right_environment()) return ncclInvalidUsage;
    const ncclResult_t result =
        KCCL_REAL(ncclCommInitRankScalable, made_comm, world_size, rank, num_ids, ids, config);
    return kccl::nccl::made(result, made_comm, is_blocking(config));
}
#endif

#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 18, 0)
ncclResult_t ncclCommSplit(ncclComm_t comm, int color, int key, ncclComm_t* made_comm,
                           ncclConfig_t* config) {
    const bool parent_blocks = kccl::nccl::entry_of(comm)->is_blocking;
    const ncclResult_t result = KCCL_REAL(ncclCommSplit, comm, color, key, made_comm, config);
    return kccl::nccl::made(result, made_comm, is_blocking(config, parent_blocks));
}
#endif

ncclResult_t ncclCommFinalize(ncclComm_t comm) {
    kccl::nccl::end(comm);
    return KCCL_REAL(ncclCommFinalize, comm);
}

ncclResult_t ncclCommDestroy(ncclComm_t comm) {
    kccl::nccl::end(comm);
    return KCCL_REAL(ncclCommDestroy, comm);
}

// NCCL's part comes first: it ends the waits of other threads in NCCL.
ncclResult_t ncclCommAbort(ncclComm_t comm) {
    // NCCL may give the handle away again.
    const auto served = kccl::nccl::forget(comm);
    if (served != nullptr) served->interrupt();
    const ncclResult_t result = KCCL_REAL(ncclCommAbort, comm);
    kccl::nccl::end_aborted(served);
    return result;
}

#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 27, 0)
ncclResult_t ncclCommShrink(ncclComm_t comm, int* excludeRanksList, int excludeRanksCount,
                            ncclComm_t* made_comm, ncclConfig_t* config, int shrinkFlags) {
    const auto served = kccl::nccl::entry_of(comm)->served;
    if (served != nullptr && (shrinkFlags & NCCL_SHRINK_ABORT) != 0) served->interrupt();
    return KCCL_REAL(ncclCommShrink, comm, excludeRanksList, excludeRanksCount, made_comm, config,
                     shrinkFlags);
}
#endif

#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 29, 0)
ncclResult_t ncclCommRevoke(ncclComm_t comm, int revokeFlags) {
    const auto served = kccl::nccl::entry_of(comm)->served;
    if (served != nullptr) served->interrupt();
    return KCCL_REAL(ncclCommRevoke, comm, revokeFlags);
}
#endif

// ---- Errors -------------------------------------------------------------------------------------

ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* asyncError) {
    const ncclResult_t result = KCCL_REAL(ncclCommGetAsyncError, comm, asyncError);
    if (result != ncclSuccess || *asyncError != ncclSuccess) return result;
    const auto served = kccl::nccl::entry_of(comm)->served;
    if (served != nullptr && served->status() != kKcclOk) {
        *asyncError = ncclRemoteError;
        kccl::nccl::own_error() = served->error();
    }
    return result;
}

// NCCL's manual lets a program pass no communicator, as PyTorch does.
const char* ncclGetLastError(ncclComm_t comm) {
    static thread_local std::string words;
    const auto served = kccl::nccl::entry_of(comm)->served;
    words = served != nullptr ? served->error() : "";
    if (words.empty()) words = kccl::nccl::own_error();
    return words.empty() ? KCCL_REAL(ncclGetLastError, comm) : words.c_str();
}

// ---- Groups -------------------------------------------------------------------------------------

ncclResult_t ncclGroupStart() { return kccl::nccl::begin_group(); }

ncclResult_t ncclGroupEnd() { return kccl::nccl::end_group(); }

#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 22, 0)
ncclResult_t ncclGroupSimulateEnd(ncclSimInfo_t* simInfo) {
    const ncclResult_t result = kccl::nccl::pass_group();
    const ncclResult_t ended = KCCL_REAL(ncclGroupSimulateEnd, simInfo);
    return result != ncclSuccess ? result : ended;
}
#endif

// ---- Collectives --------------------------------------------------------------------------------

ncclResult_t ncclAllReduce(const void* sendbuff, void* recvbuff, size_t count,
                           ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm,
                           cudaStream_t stream) {
    return kccl::nccl::make({"ncclAllReduce",
                             comm,
                             true,
                             {Collective::kAllReduce, count, datatype, op, 0},
                             {sendbuff, recvbuff, 0, stream_of(stream)},
                             [=] {
                                 return KCCL_REAL(ncclAllReduce, sendbuff, recvbuff, count,
                                                  datatype, op, comm, stream);
                             }});
}

ncclResult_t ncclReduceScatter(const void* sendbuff, void* recvbuff, size_t recvcount,
                               ncclDataType_t datatype, ncclRedOp_t op, ncclComm_t comm,
                               cudaStream_t stream) {
    return kccl::nccl::make({"ncclReduceScatter",
                             comm,
                             true,
                             {Collective::kReduceScatter, recvcount, datatype, op, 0},
                             {sendbuff, recvbuff, 0, stream_of(stream)},
                             [=] {
                                 return KCCL_REAL(ncclReduceScatter, sendbuff, recvbuff, recvcount,
                                                  datatype, op, comm, stream);
                             }});
}

ncclResult_t ncclAllGather(const void* sendbuff, void* recvbuff, size_t sendcount,
                           ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream) {
    return kccl::nccl::make({"ncclAllGather",
                             comm,
                             true,
                             {Collective::kAllGather, sendcount, datatype, ncclSum, 0},
                             {sendbuff, recvbuff, 0, stream_of(stream)},
                             [=] {
                                 return KCCL_REAL(ncclAllGather, sendbuff, recvbuff, sendcount,
                                                  datatype, comm, stream);
                             }});
}

ncclResult_t ncclBroadcast(const void* sendbuff, void* recvbuff, size_t count,
                           ncclDataType_t datatype, int root, ncclComm_t comm,
                           cudaStream_t stream) {
    return kccl::nccl::make({"ncclBroadcast",
                             comm,
                             true,
                             {Collective::kBroadcast, count, datatype, ncclSum, 0},
                             {sendbuff, recvbuff, root, stream_of(stream)},
                             [=] {
                                 return KCCL_REAL(ncclBroadcast, sendbuff, recvbuff, count,
                                                  datatype, root, comm, stream);
                             }});
}

ncclResult_t ncclBcast(void* buff, size_t count, ncclDataType_t datatype, int root, ncclComm_t comm,
                       cudaStream_t stream) {
    return ncclBroadcast(buff, buff, count, datatype, root, comm, stream);
}

// Collectives that NCCL always makes, but that count in a group.

ncclResult_t ncclReduce(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                        ncclRedOp_t op, int root, ncclComm_t comm, cudaStream_t stream) {
    return kccl::nccl::make({"ncclReduce",
                             comm,
                             false,
                             {Collective::kAllReduce, count, datatype, op, 0},
                             {sendbuff, recvbuff, root, stream_of(stream)},
                             [=] {
                                 return KCCL_REAL(ncclReduce, sendbuff, recvbuff, count, datatype,
                                                  op, root, comm, stream);
                             }});
}

#if NCCL_VERSION_CODE >= NCCL_VERSION(2, 28, 0)
ncclResult_t ncclAlltoAll(const void* sendbuff, void* recvbuff, size_t count,
                          ncclDataType_t datatype, ncclComm_t comm, cudaStream_t stream) {
    return kccl::nccl::make({"ncclAlltoAll",
                             comm,
                             false,
                             {Collective::kAllGather, count, datatype, ncclSum, 0},
                             {sendbuff, recvbuff, 0, stream_of(stream)},
                             [=] {
                                 return KCCL_REAL(ncclAlltoAll, sendbuff, recvbuff, count, datatype,
                                                  comm, stream);
                             }});
}

ncclResult_t ncclGather(const void* sendbuff, void* recvbuff, size_t count, ncclDataType_t datatype,
                        int root, ncclComm_t comm, cudaStream_t stream) {
    return kccl::nccl::make({"ncclGather",
                             comm,
                             false,
                             {Collective::kAllGather, count, datatype, ncclSum, 0},
                             {sendbuff, recvbuff, root, stream_of(stream)},
                             [=] {
                                 return KCCL_REAL(ncclGather, sendbuff, recvbuff, count, datatype,
                                                  root, comm, stream);
                             }});
}

ncclResult_t ncclScatter(const void* sendbuff, void* recvbuff, size_t count,
                         ncclDataType_t datatype, int root, ncclComm_t comm, cudaStream_t stream) {
    return kccl::nccl::make({"ncclScatter",
                             comm,
                             false,
                             {Collective::kBroadcast, count, datatype, ncclSum, 0},
                             {sendbuff, recvbuff, root, stream_of(stream)},
                             [=] {
                                 return KCCL_REAL(ncclScatter, sendbuff, recvbuff, count, datatype,
                                                  root, comm, stream);
                             }});
}
#endif

// ---- Messages -----------------------------------------------------------------------------------

ncclResult_t ncclSend(const void* sendbuff, size_t count, ncclDataType_t datatype, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
    return kccl::nccl::make_message(comm, stream_of(stream), [=] {
        return KCCL_REAL(ncclSend, sendbuff, count, datatype, peer, comm, stream);
    });
}

ncclResult_t ncclRecv(void* recvbuff, size_t count, ncclDataType_t datatype, int peer,
                      ncclComm_t comm, cudaStream_t stream) {
    return kccl::nccl::make_message(comm, stream_of(stream), [=] {
        return KCCL_REAL(ncclRecv, recvbuff, count, datatype, peer, comm, stream);
    });
}

// ---- All others ---------------------------------------------------------------------------------

#define KCCL_FORWARD(Result, name, parameters, ...) \
    Result name parameters { return KCCL_REAL(name __VA_OPT__(, ) __VA_ARGS__); }
#include "forwards.inc"

}  // extern "C"
