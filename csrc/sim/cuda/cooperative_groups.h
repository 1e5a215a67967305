// <cooperative_groups.h> for CUDA kernels that are compiled for a CPU: it does not exist. Instead
// of sync() of a grid there is kccl::grid_sync(comm); instead of parts of a warp, __shfl_sync with
// a width.
#error "cooperative_groups.h: here write kccl::block(), kccl::warp() and their sync()"
