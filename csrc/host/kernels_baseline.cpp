#include "kernel_table.inc"

namespace kccl::host {
extern constinit const KernelTable kKernelsBaseline = all_kernels();
}
