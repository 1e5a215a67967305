// CUDA's driver, which is looked up when it is first used: this library is loaded into every
// process that a program starts, also into those that need no GPU.
#pragma once

namespace kccl::nccl {

// Returns a function of the driver by its name with its version, as in "cuMemAlloc_v2"; null if
// there is no driver, or if it has no such function.
void* driver_function(const char* name);

}  // namespace kccl::nccl
