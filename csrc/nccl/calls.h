// Who makes a call: KCCL or NCCL. All ranks come to the same answer, because it depends only on
// what NCCL requires to be equal on all ranks: the communicator, the call's collective, count, type
// and operator, and whether it is the communicator's only collective in a group.
#pragma once

#include <functional>

#include "communicators.h"

namespace kccl::nccl {

// A call as the program makes it.
struct Call {
    const char* name;  // of NCCL's function
    ncclComm_t comm;
    bool is_known;  // KCCL may have kernels for it
    Request request;
    Arguments arguments;
    std::function<ncclResult_t()> pass;  // lets NCCL make it
};

// Makes a call of all ranks, or holds it until its group ends.
ncclResult_t make(Call call);
// Lets NCCL send or receive a message on a stream.
ncclResult_t make_message(ncclComm_t comm, CUstream stream,
                          const std::function<ncclResult_t()>& pass);

// Lets this process say at its end how many collectives KCCL made, and how many NCCL.
void log_counts_at_exit();

// Begins a group, and ends one. Only the outermost group of a thread counts, as in NCCL.
ncclResult_t begin_group();
ncclResult_t end_group();
// Lets NCCL make the calls of a group, which is then ended by a function of NCCL's that is no
// ncclGroupEnd.
ncclResult_t pass_group();

// Notes the result of a function that makes a communicator, and starts it. Within a group this
// happens at its end.
ncclResult_t made(ncclResult_t result, ncclComm_t* comm, bool is_blocking);

}  // namespace kccl::nccl
