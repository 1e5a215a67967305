#if defined(__x86_64__)
#include "elementwise.h"

namespace kccl::engine {
extern constinit const Compute kComputeV4 = named("x86-64-v4");
}
#endif
