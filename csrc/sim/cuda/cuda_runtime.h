// <cuda_runtime.h> for CUDA kernels that are compiled for a CPU. What kernels need of it is in
// kccl/targets/cuda_words.h. Its functions for hosts do not exist: the program in Python allocates
// memory and launches.
#pragma once

#include <kccl/mem.cuh>
