// <assert.h> of kernels that a CPU runs: see kccl/targets/cuda_words.h. The C library's would end
// the interpreter.
#include <kccl/mem.cuh>
