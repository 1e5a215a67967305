// Includes the struct Vector of the instruction set that the compiler's flags name.
#pragma once

#if defined(__AVX512F__)
#include "vector_avx512.h"
#elif defined(__AVX2__)
#include "vector_avx2.h"
#elif defined(__aarch64__)
#include "vector_neon.h"
#else
#include "vector_baseline.h"
#endif
