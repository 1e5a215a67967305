// The communicators of NCCL's that this process has, and which of them KCCL serves.
//
// All ranks of a communicator serve it, or none does. They agree when it has been made, by an
// all-gather of NCCL's on it. Every communicator that ncclCommInitRank or ncclCommSplit has made,
// and whose number of ranks KCCL has kernels for, gets that all-gather, whatever KCCL_NCCL says,
// because ranks must not differ in it.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "api.h"
#include "served.h"

namespace kccl::nccl {

enum class Mode { kOn, kLog, kOff };

// Returns what KCCL_NCCL says.
Mode mode();
// Says what is wrong with the environment; "": nothing.
std::string wrong_environment();

// What is known of a communicator.
struct Entry {
    std::shared_ptr<Served> served;  // null: NCCL makes all its calls
    std::string why_not;             // then the reason
    int rank = -1;
    int world_size = 0;
    bool is_blocking = true;
};

// Returns what is known of a communicator, also of one that this library has not seen; never null.
std::shared_ptr<const Entry> entry_of(ncclComm_t comm);

// Notes a communicator that NCCL makes all calls of.
void pass(ncclComm_t comm, const std::string& why_not, bool is_blocking);

// Agrees with the other ranks who serves the communicators that this thread has just made, and
// starts. More than one: those of a group, of several GPUs. Collective.
ncclResult_t start(const std::vector<ncclComm_t>& made);

// Forgets a communicator, and returns its part in KCCL; null if there is none.
std::shared_ptr<Served> forget(ncclComm_t comm);

// Ends a communicator's part in KCCL, when its kernels have ended, and forgets it.
void end(ncclComm_t comm);
// Ends a part that was forgotten and interrupted. If its kernels may still run a moment later, the
// memory stays until they have ended.
void end_aborted(const std::shared_ptr<Served>& served);

}  // namespace kccl::nccl
