// Checked calls of reduce_scatter: see collective.h.
#pragma once

#include "../collective.h"

namespace of_reduce_scatter {

inline constexpr Collective kCollective = kReduction<true>;

}  // namespace of_reduce_scatter
