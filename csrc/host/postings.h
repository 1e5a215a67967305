// Makes the steps of a chain (chain.inc) in which ranks post small parts of calls.
#pragma once

#include "routes.h"

namespace kccl::host {

// Makes a kKcclPostStep. Its op.call has the channel, the rank's input and output, and the facts
// that the ranks compare. Returns false if the communicator has failed.
bool run_posted(const KcclHostTeams& teams, KcclHostStep& step);

}  // namespace kccl::host
