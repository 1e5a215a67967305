#if defined(__x86_64__)
#include "elementwise.h"

namespace kccl::engine {
extern constinit const Compute kComputeV3 = named("x86-64-v3");
}
#endif
