// How a rank's messages reach all ranks of a communicator of several teams, and how it waits for
// them: what messages.cpp and chain.cpp need of routes.cpp.
//
// A rank that gives up tells its teams (chain.cpp). Here it also tells every rank directly, because
// a receive waits for one rank, which may be in no team of the rank that gives up.
#pragma once

#include "../include/kccl/wait.cuh"
#include "chain.h"
#include "far_link.h"

namespace kccl::host {

// Returns the DeviceComm of two ranks, this one and `rank`. All zero: `rank` is on another node.
inline const KcclDeviceComm& pair_of(const KcclRoutes& routes, int rank) {
    return reinterpret_cast<const KcclDeviceComm*>(routes.pairs)[rank];
}
// Returns the number of `rank` in that pair, 0 or 1.
inline int place_in_pair(const KcclRoutes& routes, int rank) { return rank > routes.rank ? 1 : 0; }

// How often a rank that waits for a message looks at the processes of those who may send it.
constexpr uint64_t kLookEveryNs = 2'000'000;

// Returns the link to a rank of another node; null: the rank shares memory with this one.
FarLink* link_of(const KcclRoutes& routes, int rank);

// Tells every rank directly that this one gave up. The ranks in `record` have their numbers in the
// communicator.
void tell_routes(KcclRoutes& routes, const KcclRecord& record);

// Checks whether a rank has said that it gave up. If so, fails this rank with that record, tells
// its teams, and returns true. Also notes the ranks that have closed.
bool hear_routes(KcclRoutes& routes);

// The slow path of a wait for a message.
class MessagePatience {
  public:
    // hopes: the ranks that may send or receive the message, a bit each. needs_all: all of them are
    // needed; false: one of them. has_limit: the wait has the communicator's timeout.
    MessagePatience(KcclRoutes& routes, const Awaited& awaited, uint64_t hopes, bool needs_all,
                    bool has_limit)
        : routes_(routes),
          awaited_(awaited),
          hopes_(hopes),
          needs_all_(needs_all),
          has_limit_(has_limit) {}

    // Returns false when the wait has failed. num_early: see Messages.
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
