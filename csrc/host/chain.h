// The functions of chain.cpp that fail the teams of a rank together.
#pragma once

#include "nodes.h"

namespace kccl::host {

// A function of chain.cpp, which a rank calls now and then while it waits in a step or for a
// message. If a peer of any team of the rank has given up, it fails all of the rank's teams, and so
// ends the wait.
extern void (*team_hook)();

// Names the teams that team_hook checks in this thread while the object lives. Objects nest,
// because a signal handler may make a call of another communicator meanwhile.
class TeamsInUse {
  public:
    explicit TeamsInUse(const KcclHostTeams* teams);
    ~TeamsInUse();
    TeamsInUse(const TeamsInUse&) = delete;
    TeamsInUse& operator=(const TeamsInUse&) = delete;

  private:
    const KcclHostTeams* const before_;
};

// Fails the communicator, unless it has failed already, and tells all ranks. The ranks in `record`
// have their numbers in the communicator.
void fail_all(const KcclHostTeams& teams, const KcclRecord& record);

// Tells the peers of the rank's teams why the communicator has failed.
void pass_on(const KcclHostTeams& teams);

}  // namespace kccl::host
