#include "elementwise.h"
#include "multiply.h"
#include "vector_baseline.h"

namespace kccl::engine {
extern constinit const Compute kComputeBaseline = named("baseline");
}
