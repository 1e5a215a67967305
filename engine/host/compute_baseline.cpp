#include "elementwise.h"

namespace kccl::engine {
extern constinit const Compute kComputeBaseline = named("baseline");
}
