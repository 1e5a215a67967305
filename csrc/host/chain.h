// The functions of chain.cpp that fail the teams of a rank together.
#pragma once

#include "nodes.h"

namespace kccl::host {

// chain.cpp sets it. A rank that waits in a step, or for a message, calls it now and then: if a
// peer of another team of the rank has given up, it fails all of the rank's teams, and so the wait.
extern void (*team_hook)();

// Within it, a wait of this thread looks at these teams. A signal handler that runs within it may
// make a call of another communicator.
class TeamsInUse {
  public:
    explicit TeamsInUse(const KcclHostTeams* teams);
    ~TeamsInUse();
    TeamsInUse(const TeamsInUse&) = delete;
    TeamsInUse& operator=(const TeamsInUse&) = delete;

  private:
    const KcclHostTeams* const before_;
};

// Fails the communicator, unless it has failed, and tells all ranks. `record` has the
// communicator's numbers of ranks.
void fail_all(const KcclHostTeams& teams, const KcclRecord& record);

// Tells the peers of the rank's teams why the communicator has failed.
void pass_on(const KcclHostTeams& teams);

}  // namespace kccl::host
