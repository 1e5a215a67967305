// The part of CUDA's runtime that nccl.h needs, so that a build needs no more of CUDA than cuda.h.
// nccl.h then leaves out the headers for types of 16 and 8 bits, which its functions do not use.
#pragma once

#include <cuda.h>

using cudaStream_t = CUstream;
