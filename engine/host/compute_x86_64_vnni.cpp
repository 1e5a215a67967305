#if defined(__x86_64__)
#include "elementwise.h"

namespace kccl::engine {
extern constinit const Compute kComputeVnni = named("x86-64-v4-vnni");
}
#endif
