// <cuda_bf16.h> for CUDA kernels that are compiled for a CPU: the functions with bfloat16 in their
// names. The others are in small_floats.h.
#pragma once

#include "small_floats.h"

KCCL_SMALL_FLOAT(__nv_bfloat16, __nv_bfloat162, kccl::words::Bfloat16)
using nv_bfloat16 = __nv_bfloat16;
using nv_bfloat162 = __nv_bfloat162;

KCCL_WORD __nv_bfloat16 __float2bfloat16(float value) { return __nv_bfloat16(value); }
KCCL_WORD __nv_bfloat16 __float2bfloat16_rn(float value) { return __nv_bfloat16(value); }
KCCL_WORD __nv_bfloat16 __double2bfloat16(double value) { return __nv_bfloat16(value); }
KCCL_WORD float __bfloat162float(__nv_bfloat16 value) { return value; }
KCCL_WORD __nv_bfloat16 __int2bfloat16_rn(int value) { return __nv_bfloat16(value); }
KCCL_WORD unsigned short __bfloat16_as_ushort(__nv_bfloat16 value) { return value.bits; }
KCCL_WORD __nv_bfloat16 __ushort_as_bfloat16(unsigned short bits) {
    return kccl::platform::bit_cast<__nv_bfloat16>(bits);
}
KCCL_WORD __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
KCCL_WORD __nv_bfloat162 make_bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
KCCL_WORD __nv_bfloat162 __bfloat162bfloat162(__nv_bfloat16 value) { return {value, value}; }
KCCL_WORD __nv_bfloat162 __float2bfloat162_rn(float value) { return {value, value}; }
KCCL_WORD __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {x, y}; }
KCCL_WORD __nv_bfloat162 __float22bfloat162_rn(float2 both) { return {both.x, both.y}; }
KCCL_WORD float2 __bfloat1622float2(__nv_bfloat162 both) { return {both.x, both.y}; }
KCCL_WORD __nv_bfloat16 __low2bfloat16(__nv_bfloat162 both) { return both.x; }
KCCL_WORD __nv_bfloat16 __high2bfloat16(__nv_bfloat162 both) { return both.y; }
KCCL_WORD __nv_bfloat16 hsqrt(__nv_bfloat16 value) { return __nv_bfloat16(__builtin_sqrtf(value)); }
KCCL_WORD __nv_bfloat16 hexp(__nv_bfloat16 value) { return __nv_bfloat16(expf(value)); }
