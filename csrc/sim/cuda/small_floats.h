// The 16-bit float types of cuda_fp16.h and cuda_bf16.h, for CUDA kernels that are compiled for a
// CPU. Each operation is done in float, and its result is rounded once, to nearest even.
#pragma once

#include <kccl/mem.cuh>

namespace kccl::words {

// Half and Bfloat16 convert between float and the bits of these types. narrow() turns every NaN
// into CUDA's canonical NaN.
struct Half {
    KCCL_WORD static float widen(uint16_t bits) { return mem::float_from_half(bits); }
    KCCL_WORD static uint16_t narrow(float value) {
        return value != value ? uint16_t{0x7fff} : mem::half_from_float(value);
    }
};
struct Bfloat16 {
    KCCL_WORD static float widen(uint16_t bits) {
        return platform::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
    }
    KCCL_WORD static uint16_t narrow(float value) {
        return value != value ? uint16_t{0x7fff} : mem::bfloat16_from_float(value);
    }
};

}  // namespace kccl::words

// Defines a 16-bit float type (__half or __nv_bfloat16), the struct of two of them (__half2 or
// __nv_bfloat162), their operators, and those functions that have the same name in CUDA for half
// and bfloat16, such as __hadd(). Functions with the type in their name, such as __float2half(),
// are in cuda_fp16.h and cuda_bf16.h. format: Half or Bfloat16 above, which converts.
#define KCCL_SMALL_FLOAT(type, pair, format)                                                 \
    struct alignas(2) type {                                                                 \
        uint16_t bits;                                                                       \
        type() = default;                                                                    \
        KCCL_WORD type(float value) : bits(format::narrow(value)) {}                         \
        KCCL_WORD type(double value) : type(static_cast<float>(value)) {}                    \
        KCCL_WORD type(int value) : type(static_cast<float>(value)) {}                       \
        KCCL_WORD operator float() const { return format::widen(bits); }                     \
        KCCL_WORD type& operator+=(type b) { return *this = type(float(*this) + float(b)); } \
        KCCL_WORD type& operator-=(type b) { return *this = type(float(*this) - float(b)); } \
        KCCL_WORD type& operator*=(type b) { return *this = type(float(*this) * float(b)); } \
        KCCL_WORD type& operator/=(type b) { return *this = type(float(*this) / float(b)); } \
    };                                                                                       \
    struct alignas(4) pair {                                                                 \
        type x, y;                                                                           \
    };                                                                                       \
    KCCL_WORD type operator+(type a, type b) { return type(float(a) + float(b)); }           \
    KCCL_WORD type operator-(type a, type b) { return type(float(a) - float(b)); }           \
    KCCL_WORD type operator*(type a, type b) { return type(float(a) * float(b)); }           \
    KCCL_WORD type operator/(type a, type b) { return type(float(a) / float(b)); }           \
    KCCL_WORD type operator-(type a) { return type(-float(a)); }                             \
    KCCL_WORD bool operator==(type a, type b) { return float(a) == float(b); }               \
    KCCL_WORD bool operator!=(type a, type b) { return float(a) != float(b); }               \
    KCCL_WORD bool operator<(type a, type b) { return float(a) < float(b); }                 \
    KCCL_WORD bool operator>(type a, type b) { return float(a) > float(b); }                 \
    KCCL_WORD bool operator<=(type a, type b) { return float(a) <= float(b); }               \
    KCCL_WORD bool operator>=(type a, type b) { return float(a) >= float(b); }               \
    KCCL_WORD pair operator+(pair a, pair b) { return {a.x + b.x, a.y + b.y}; }              \
    KCCL_WORD pair operator-(pair a, pair b) { return {a.x - b.x, a.y - b.y}; }              \
    KCCL_WORD pair operator*(pair a, pair b) { return {a.x * b.x, a.y * b.y}; }              \
    KCCL_WORD type __hadd(type a, type b) { return a + b; }                                  \
    KCCL_WORD type __hsub(type a, type b) { return a - b; }                                  \
    KCCL_WORD type __hmul(type a, type b) { return a * b; }                                  \
    KCCL_WORD type __hdiv(type a, type b) { return a / b; }                                  \
    KCCL_WORD type __hneg(type a) { return -a; }                                             \
    KCCL_WORD type __hfma(type a, type b, type c) {                                          \
        return type(__builtin_fmaf(float(a), float(b), float(c)));                           \
    }                                                                                        \
    KCCL_WORD type __hmax(type a, type b) { return type(max(float(a), float(b))); }          \
    KCCL_WORD type __hmin(type a, type b) { return type(min(float(a), float(b))); }          \
    KCCL_WORD bool __hisnan(type a) { return float(a) != float(a); }                         \
    KCCL_WORD bool __heq(type a, type b) { return a == b; }                                  \
    KCCL_WORD bool __hlt(type a, type b) { return a < b; }                                   \
    KCCL_WORD bool __hgt(type a, type b) { return a > b; }                                   \
    KCCL_WORD pair __hadd2(pair a, pair b) { return a + b; }                                 \
    KCCL_WORD pair __hsub2(pair a, pair b) { return a - b; }                                 \
    KCCL_WORD pair __hmul2(pair a, pair b) { return a * b; }                                 \
    KCCL_WORD pair __hfma2(pair a, pair b, pair c) {                                         \
        return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};                               \
    }                                                                                        \
    KCCL_WORD type __ldg(const type* address) { return *address; }                           \
    KCCL_WORD float __low2float(pair both) { return both.x; }                                \
    KCCL_WORD float __high2float(pair both) { return both.y; }
