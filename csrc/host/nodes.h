// What chain.cpp needs of nodes.cpp.
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

// A peer waits this long for the last message of a rank that has ended, in nanoseconds. The message
// may still be on its way, because MPI sends only while its rank calls it.
constexpr uint64_t kLastWordsNs = 20'000'000;
// A rank that closes its communicator calls MPI this long, unless all is sent before.
constexpr uint64_t kFlushNs = 100'000'000;

// Makes a step between nodes. Returns the status of the team.
uint32_t run_between_nodes(KcclNodes& nodes, const KcclHostStep& step);

// Tells the peers that this rank has failed, once. The ranks in `record` have their numbers in the
// communicator, as chain.cpp passes them on.
void tell_nodes(KcclNodes& nodes, const KcclRecord& record);

// Reads what peers have said on their streams, without waiting. Returns true if one has failed, and
// stores its record in *record.
bool hear_nodes(KcclNodes& nodes, KcclRecord* record);

}  // namespace kccl::host
