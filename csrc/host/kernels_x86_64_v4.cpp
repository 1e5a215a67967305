#include "kernel_table.inc"

#if defined(__x86_64__)
namespace kccl::host {
extern constinit const KernelTable kKernelsV4 = all_kernels();
}
#endif
