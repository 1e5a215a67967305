// The functions of nodes.cpp, which makes steps between nodes by MPI, that chain.cpp calls.
#pragma once

#include "../include/kccl/abi.h"
#include "host.h"

extern "C" {
// clang-format off: the first declares what the second uses.
#include "nodes.inc"
#include "chain.inc"
// clang-format on
}

namespace kccl::host {

// How long a rank still waits for a message of a peer whose process has ended. MPI may have sent
// the message before that end, and still be delivering it.
constexpr uint64_t kLastWordsNs = 20'000'000;
// A rank that closes its communicator goes on calling MPI for at most this long, because MPI sends
// what is under way only while its process calls it.
constexpr uint64_t kFlushNs = 100'000'000;

// Makes one step of kind kKcclNodesStep. Returns the status of the team's communicator,
// step.op.call.comm.
uint32_t run_between_nodes(KcclNodes& nodes, const KcclHostStep& step);

// Tells the other ranks of a team that spans nodes that this rank has failed; only the first call
// does so. The ranks in `record` are numbers in the communicator plus kOfCommunicator (chain.cpp).
void tell_nodes(KcclNodes& nodes, const KcclRecord& record);

// Reads the control records that peers have sent by the sockets (nodes_exchange.h), without
// waiting. If a peer has failed, stores its failure record in *record and returns true. Sets the
// bits of peers that have closed in nodes.closed.
bool hear_nodes(KcclNodes& nodes, KcclRecord* record);

}  // namespace kccl::host
