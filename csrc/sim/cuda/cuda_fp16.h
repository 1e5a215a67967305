// <cuda_fp16.h> for CUDA kernels that are compiled for a CPU: the functions with half in their
// names. The others are in small_floats.h.
#pragma once

#include "small_floats.h"

KCCL_SMALL_FLOAT(__half, __half2, kccl::words::Half)
using half = __half;
using half2 = __half2;

KCCL_WORD __half __float2half(float value) { return __half(value); }
KCCL_WORD __half __float2half_rn(float value) { return __half(value); }
KCCL_WORD __half __double2half(double value) { return __half(value); }
KCCL_WORD float __half2float(__half value) { return value; }
KCCL_WORD __half __int2half_rn(int value) { return __half(value); }
KCCL_WORD int __half2int_rn(__half value) { return __float2int_rn(value); }
KCCL_WORD unsigned short __half_as_ushort(__half value) { return value.bits; }
KCCL_WORD __half __ushort_as_half(unsigned short bits) {
    return kccl::platform::bit_cast<__half>(bits);
}
KCCL_WORD __half2 __halves2half2(__half x, __half y) { return {x, y}; }
KCCL_WORD __half2 make_half2(__half x, __half y) { return {x, y}; }
KCCL_WORD __half2 __half2half2(__half value) { return {value, value}; }
KCCL_WORD __half2 __float2half2_rn(float value) { return {value, value}; }
KCCL_WORD __half2 __floats2half2_rn(float x, float y) { return {x, y}; }
KCCL_WORD __half2 __float22half2_rn(float2 both) { return {both.x, both.y}; }
KCCL_WORD float2 __half22float2(__half2 both) { return {both.x, both.y}; }
KCCL_WORD __half __low2half(__half2 both) { return both.x; }
KCCL_WORD __half __high2half(__half2 both) { return both.y; }
KCCL_WORD __half hsqrt(__half value) { return __half(__builtin_sqrtf(value)); }
KCCL_WORD __half hexp(__half value) { return __half(expf(value)); }
