// Checked calls of all_reduce: see collective.h.
#pragma once

#include "../collective.h"

namespace of_all_reduce {

inline constexpr Collective kCollective = kReduction<false>;

}  // namespace of_all_reduce
