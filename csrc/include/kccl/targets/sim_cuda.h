// CUDA's qualifiers for kernels that the simulator runs; cuda_words.h has the functions. So a
// kernel that uses only these and KCCL compiles for both. Block-shared memory is declared in
// another way: by KCCL_BLOCK_SHARED or platform::dynamic_shared(). The error for __shared__, in
// kccl/jit/cuda_words.py, says so.
#pragma once

// GNU's <math.h>, which cuda_words.h includes, declares the special functions of C++17. Their
// headers take a third of a small kernel's compilation, and no kernel of CUDA can call them. nvcc
// includes <utility>, too.
#include <utility>
#undef _GLIBCXX_USE_STD_SPEC_FUNCS

#define __global__ inline
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __align__(n) __attribute__((aligned(n)))
// A constant of CUDA, which must be initialised where it is declared.
#define __constant__ static
