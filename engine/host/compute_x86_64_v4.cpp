#if defined(__x86_64__)
#include "elementwise.h"
#include "multiply.h"
#include "vector_avx512.h"

namespace kccl::engine {
extern constinit const Compute kComputeV4 = named("x86-64-v4");
}
#endif
