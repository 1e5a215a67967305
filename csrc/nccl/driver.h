// CUDA's driver, which is looked up when it is first used: this library is loaded into every
// process that a program starts, also into those that need no GPU.
#pragma once

#include <string>

namespace kccl::nccl {

// Returns a function of the driver by its name with its version, as in "cuMemAlloc_v2"; null if
// there is no driver, or if it has no such function.
void* driver_function(const char* name);

// Returns an error's name and number, as in "CUDA_ERROR_OUT_OF_MEMORY (2)". code: CUresult.
std::string name_of_error(int code);

}  // namespace kccl::nccl
