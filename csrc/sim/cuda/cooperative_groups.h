// <cooperative_groups.h> of kernels that a CPU runs. For a whole grid there is
// kccl::grid_sync(comm), for parts of a warp __shfl_sync with a width.
#error "cooperative_groups.h: here write kccl::block(), kccl::warp() and their sync()"
