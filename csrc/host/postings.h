// Makes the steps of a chain in which ranks post small parts of calls.
#pragma once

#include "routes.h"

namespace kccl::host {

// Makes a kKcclPostStep, whose op.call has the channel and what the ranks compare. Returns false
// when the communicator has failed.
bool run_posted(const KcclHostTeams& teams, KcclHostStep& step);

}  // namespace kccl::host
