// Functions of routes.cpp, for messages.h, chain.cpp and postings.cpp: how a rank's messages
// reach all ranks of a communicator of several teams (chain.inc), and how the rank waits for them.
//
// A team is a group of at most 8 ranks that make the steps of calls together. A rank that gives up
// tells the peers of its teams (chain.cpp). By these functions it also tells every rank directly,
// because a rank that waits for a message of this one may share no team with it.
#pragma once

#include "../include/kccl/wait.cuh"
#include "chain.h"
#include "far_link.h"

namespace kccl::host {

// Returns the DeviceComm of the pair of this rank and `rank`. All its bytes are zero if `rank` is
// on another node.
inline const KcclDeviceComm& pair_of(const KcclRoutes& routes, int rank) {
    return reinterpret_cast<const KcclDeviceComm*>(routes.pairs)[rank];
}
// Returns the number of `rank` in its pair with this rank: 0 for the lower rank, 1 for the other.
inline int place_in_pair(const KcclRoutes& routes, int rank) { return rank > routes.rank ? 1 : 0; }

// Makes the messages that are parts of a call. Each one's bytes begin at its offset in the input,
// or in the output if it is received. Returns when all are done, or after a failure.
void make_messages(uint64_t idle_context, KcclMessage* messages, const uint64_t* offsets,
                   uint64_t count, uint64_t input, uint64_t output);

// A rank that waits for a message checks this often whether the processes are alive from which the
// message may come, or to which it goes.
constexpr uint64_t kLookEveryNs = 2'000'000;

// Returns the link by MPI to a rank of another node, or null if the rank shares memory with this
// one.
FarLink* link_of(const KcclRoutes& routes, int rank);

// Tells every rank directly that this rank gave up, and why; only the first call does so. The ranks
// in `record` are numbers in the communicator.
void tell_routes(KcclRoutes& routes, const KcclRecord& record);

// Checks whether another rank has said directly that it gave up. If so, fails this rank with the
// other rank's record, tells the peers of this rank's teams, and returns true. Also notes in
// routes.closed the ranks that have closed.
bool hear_routes(KcclRoutes& routes);

// What a wait for a message or for a posted part (postings.h) does between two rounds of polls:
// checks for failures, lost ranks and the timeout.
class MessagePatience {
  public:
    // hopes: the ranks that may still end the wait (from which the message may come, or to which it
    // goes), a bit each. needs_all: whether the wait fails when one of them is lost; otherwise it
    // fails when all are. has_limit: whether the wait ends at the communicator's timeout.
    MessagePatience(KcclRoutes& routes, const Awaited& awaited, uint64_t hopes, bool needs_all,
                    bool has_limit)
        : routes_(routes),
          awaited_(awaited),
          hopes_(hopes),
          needs_all_(needs_all),
          has_limit_(has_limit) {}

    // Decides whether the wait may go on. If it has failed, fails the communicator and returns
    // false. num_early: the number of early messages of these ranks (messages.h), for the record.
    bool may_go_on(const KcclDeviceComm& comm, uint32_t num_early);

  private:
    void look_at_processes(uint64_t now);

    KcclRoutes& routes_;
    const Awaited awaited_;
    const uint64_t hopes_;
    const bool needs_all_, has_limit_;
    uint64_t started_ns_ = 0, clock_looked_ns_ = 0, looked_ns_ = 0, hopeless_since_ns_ = 0;
    uint64_t gone_ = 0;
};

}  // namespace kccl::host
