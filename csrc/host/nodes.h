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

// How long a rank still waits for a message of a peer whose process has ended. The message may have
// left the peer before its end and still be on its way.
constexpr uint64_t kLastWordsNs = 20'000'000;
// A rank that closes its communicator goes on calling MPI for at most this long, because MPI sends
// what is under way only while its process calls it.
constexpr uint64_t kFlushNs = 100'000'000;

// Makes a kKcclNodesStep. Returns the status of the team, which is step.op.call.comm.
uint32_t run_between_nodes(KcclNodes& nodes, const KcclHostStep& step);

// Tells the team's peers on other nodes that this rank has failed; only the first call does so. The
// ranks in `record` are numbers in the communicator plus kOfCommunicator (chain.cpp).
void tell_nodes(KcclNodes& nodes, const KcclRecord& record);

// Reads what peers have said on their streams, without waiting. If a peer has failed, stores its
// record in *record and returns true. Notes peers that have closed in nodes.closed.
bool hear_nodes(KcclNodes& nodes, KcclRecord* record);

}  // namespace kccl::host
