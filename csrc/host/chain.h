// Functions of chain.cpp by which a failure in one of a rank's teams (see chain.inc) spreads to its
// other teams.
#pragma once

#include "nodes.h"

namespace kccl::host {

// A function of chain.cpp, which a rank calls now and then while it waits in a step or for a
// message. If a peer of any of the rank's teams has given up, the function fails all of the rank's
// teams, which ends the wait.
extern void (*team_hook)();

// While such an object lives, team_hook checks these teams in this thread. Objects nest: a signal
// handler that runs during a call may make a call of another communicator.
class TeamsInUse {
  public:
    explicit TeamsInUse(const KcclHostTeams* teams);
    ~TeamsInUse();
    TeamsInUse(const TeamsInUse&) = delete;
    TeamsInUse& operator=(const TeamsInUse&) = delete;

  private:
    const KcclHostTeams* const before_;
};

// Fails the communicator, unless it has failed already: stores `record` and its status, and tells
// all ranks. The ranks in `record` are numbers in the communicator, not in a team.
void fail_all(const KcclHostTeams& teams, const KcclRecord& record);

// Tells the peers of all of the rank's teams that the communicator has failed, with the record in
// its KcclState.
void pass_on(const KcclHostTeams& teams);

}  // namespace kccl::host
