// <cuda_runtime.h> of kernels that a CPU runs: what kernels need of it is in cuda_words.h. The
// program in Python allocates memory and launches.
#pragma once

#include <kccl/mem.cuh>
