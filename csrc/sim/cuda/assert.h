// <assert.h> for CUDA kernels that are compiled for a CPU: see assert() in
// kccl/targets/cuda_words.h. The assert() of the C library would end the Python process.
#include <kccl/mem.cuh>
