// CUDA's functions and vector types for kernels that a CPU runs, in terms of platform.cuh and
// mem.cuh. For a name of CUDA that is missing here, kccl/jit/cuda_words.py or KCCL_NO_WORD below
// has an error that says what to write instead.
#pragma once

#include <math.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#define KCCL_WORD inline __attribute__((always_inline))
// Declares a function that no CPU target has, with an error that says what to write instead.
#define KCCL_NO_WORD(name, instead)                                   \
    template <class... Arguments>                                     \
    void name(Arguments...) {                                         \
        static_assert(sizeof...(Arguments) > 99, #name ": " instead); \
    }

// ---- Vector types -------------------------------------------------------------------------------

#define KCCL_VECTORS(type, name, alignment2, alignment4)                           \
    struct name##1 { type x; };                                                    \
    struct alignas(alignment2) name##2 { type x, y; };                             \
    struct name##3 { type x, y, z; };                                              \
    struct alignas(alignment4) name##4 { type x, y, z, w; };                       \
    KCCL_WORD name##1 make_##name##1(type x) { return {x}; }                       \
    KCCL_WORD name##2 make_##name##2(type x, type y) { return {x, y}; }            \
    KCCL_WORD name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; } \
    KCCL_WORD name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }
KCCL_VECTORS(signed char, char, 2, 4)
KCCL_VECTORS(unsigned char, uchar, 2, 4)
KCCL_VECTORS(short, short, 4, 8)
KCCL_VECTORS(unsigned short, ushort, 4, 8)
KCCL_VECTORS(int, int, 8, 16)
KCCL_VECTORS(unsigned int, uint, 8, 16)
KCCL_VECTORS(float, float, 8, 16)
KCCL_VECTORS(double, double, 16, 16)
KCCL_VECTORS(long long, longlong, 16, 16)
KCCL_VECTORS(unsigned long long, ulonglong, 16, 16)
#undef KCCL_VECTORS

struct dim3 {
    unsigned int x, y, z;
    constexpr dim3(unsigned int x_ = 1, unsigned int y_ = 1, unsigned int z_ = 1)
        : x(x_), y(y_), z(z_) {}
    constexpr dim3(uint3 from) : x(from.x), y(from.y), z(from.z) {}
    constexpr operator uint3() const { return {x, y, z}; }
};

#define threadIdx (uint3{::kccl::platform::thread_in_block(), 0, 0})
#define blockIdx (uint3{::kccl::platform::block_in_grid(), 0, 0})
#define blockDim (uint3{::kccl::platform::threads_per_block(), 1, 1})
#define gridDim (uint3{::kccl::platform::blocks_per_grid(), 1, 1})
#define warpSize (static_cast<int>(::kccl::platform::kWarpSize))

// ---- Syncs, votes and shuffles ------------------------------------------------------------------
// All threads of the block, or of the warp, take part, whatever the mask says.

#define __syncthreads() ::kccl::platform::sync_block()
#define __syncwarp(...) ::kccl::platform::sync_warp()
#define __syncthreads_or(mine) (::kccl::platform::sync_block_any((mine) != 0) ? 1 : 0)
#define __syncthreads_and(mine) (::kccl::platform::sync_block_any((mine) == 0) ? 0 : 1)
#define __any_sync(mask, mine) (::kccl::platform::warp_any((mine) != 0) ? 1 : 0)
#define __all_sync(mask, mine) (::kccl::platform::warp_any((mine) == 0) ? 0 : 1)
#define __ballot_sync(mask, mine) (::kccl::platform::warp_ballot((mine) != 0))

namespace kccl::words {

// Returns the value that thread `source` of the warp passed. Types of 1 and 2 bytes are shuffled in
// a word of 4.
template <class T>
KCCL_WORD T shuffled(T value, uint32_t source) {
    if constexpr (sizeof(T) % 4 == 0) {
        return platform::shuffle(value, source);
    } else {
        uint32_t word = 0;
        platform::copy_bytes(&word, &value, sizeof(T));
        word = platform::shuffle(word, source);
        platform::copy_bytes(&value, &word, sizeof(T));
        return value;
    }
}

KCCL_WORD uint32_t lane() { return platform::thread_in_block() % platform::kWarpSize; }

}  // namespace kccl::words

template <class T>
KCCL_WORD T __shfl_sync(uint64_t, T value, int source, int width = warpSize) {
    const uint32_t lane = kccl::words::lane(), size = static_cast<uint32_t>(width);
    return kccl::words::shuffled(value, lane / size * size + static_cast<uint32_t>(source) % size);
}
template <class T>
KCCL_WORD T __shfl_xor_sync(uint64_t, T value, int mask, int width = warpSize) {
    const uint32_t lane = kccl::words::lane(), size = static_cast<uint32_t>(width);
    const uint32_t source = lane ^ static_cast<uint32_t>(mask);
    return kccl::words::shuffled(value, source / size <= lane / size ? source : lane);
}
template <class T>
KCCL_WORD T __shfl_down_sync(uint64_t, T value, unsigned int delta, int width = warpSize) {
    const uint32_t lane = kccl::words::lane(), size = static_cast<uint32_t>(width);
    return kccl::words::shuffled(value, lane % size + delta < size ? lane + delta : lane);
}
template <class T>
KCCL_WORD T __shfl_up_sync(uint64_t, T value, unsigned int delta, int width = warpSize) {
    const uint32_t lane = kccl::words::lane(), size = static_cast<uint32_t>(width);
    return kccl::words::shuffled(value, lane % size >= delta ? lane - delta : lane);
}

// ---- Memory -------------------------------------------------------------------------------------

#define __threadfence() \
    ::kccl::mem::fence<::kccl::mem::Order::kSeqCst, ::kccl::mem::Scope::kDevice>()
#define __threadfence_block() \
    ::kccl::mem::fence<::kccl::mem::Order::kSeqCst, ::kccl::mem::Scope::kBlock>()
#define __threadfence_system() \
    ::kccl::mem::fence<::kccl::mem::Order::kSeqCst, ::kccl::mem::Scope::kSystem>()

template <class T>
KCCL_WORD T __ldg(const T* address) {
    return *address;
}
#define __ldcg __ldg
#define __ldcs __ldg
#define __ldca __ldg
template <class T>
KCCL_WORD void __stcg(T* address, T value) {
    *address = value;
}
#define __stcs __stcg
#define __stwt __stcg

template <class T>
KCCL_WORD T atomicAdd(T* address, decltype(T{} + 0) value) {
    static_assert(sizeof(T) == 4 && T(1) / T(2) == T(0),
                  "atomicAdd: here it adds int and unsigned int only. A sum of floats depends on "
                  "the order of the threads: add in block-shared memory behind a sync");
    const auto sum = kccl::mem::add_and_fetch(reinterpret_cast<uint32_t*>(address),
                                              static_cast<uint32_t>(value));
    return static_cast<T>(sum - static_cast<uint32_t>(value));
}
KCCL_NO_WORD(atomicCAS, "write kccl::mem::claim(), by which 0 becomes a value once, or atomicAdd")
KCCL_NO_WORD(atomicExch, "write kccl::mem::store<order, scope>() where one thread writes")
KCCL_NO_WORD(atomicMax, "write atomicAdd, or take the maximum in block-shared memory behind a sync")
KCCL_NO_WORD(atomicMin, "write atomicAdd, or take the minimum in block-shared memory behind a sync")
KCCL_NO_WORD(atomicOr, "write atomicAdd of a bit that is set once")
KCCL_NO_WORD(atomicAnd, "write atomicAdd, or a word for each thread")
KCCL_NO_WORD(atomicXor, "write atomicAdd, or a word for each thread")
KCCL_NO_WORD(__match_any_sync, "write __ballot_sync")
KCCL_NO_WORD(__reduce_add_sync, "write a loop over __shfl_xor_sync")
#define atomicSub(address, value) atomicAdd(address, -(value))

// ---- Assertions, also behind <assert.h> and <cassert> (csrc/sim/cuda) --------------------------

#undef assert
#if defined(NDEBUG)
#define assert(condition) (static_cast<void>(0))
#else
#define assert(condition) \
    ((condition) ? static_cast<void>(0) : ::kccl::mem::fail_assertion(#condition))
#endif
#define __trap() ::kccl::mem::fail_assertion("__trap()")

// ---- Time ---------------------------------------------------------------------------------------

#define clock64() (static_cast<long long>(::kccl::mem::clock_ticks()))
#define clock() (static_cast<long long>(::kccl::mem::clock_ticks()))
#define __nanosleep(ns) ::kccl::mem::poll_pause()

// ---- Numbers ------------------------------------------------------------------------------------

#define KCCL_MIN_AND_MAX(type)                                             \
    KCCL_WORD constexpr type min(type a, type b) { return b < a ? b : a; } \
    KCCL_WORD constexpr type max(type a, type b) { return a < b ? b : a; }
KCCL_MIN_AND_MAX(int)
KCCL_MIN_AND_MAX(unsigned int)
KCCL_MIN_AND_MAX(long)
KCCL_MIN_AND_MAX(unsigned long)
KCCL_MIN_AND_MAX(long long)
KCCL_MIN_AND_MAX(unsigned long long)
#undef KCCL_MIN_AND_MAX
// If one of the two arguments is NaN, these return the other one, as CUDA's do.
KCCL_WORD float min(float a, float b) { return __builtin_fminf(a, b); }
KCCL_WORD float max(float a, float b) { return __builtin_fmaxf(a, b); }
KCCL_WORD double min(double a, double b) { return __builtin_fmin(a, b); }
KCCL_WORD double max(double a, double b) { return __builtin_fmax(a, b); }
// CUDA also has min() and max() of these pairs of types.
#define KCCL_MIN_AND_MAX(one, other)                                                        \
    KCCL_WORD constexpr other min(one a, other b) { return min(static_cast<other>(a), b); } \
    KCCL_WORD constexpr other min(other a, one b) { return min(a, static_cast<other>(b)); } \
    KCCL_WORD constexpr other max(one a, other b) { return max(static_cast<other>(a), b); } \
    KCCL_WORD constexpr other max(other a, one b) { return max(a, static_cast<other>(b)); }
KCCL_MIN_AND_MAX(int, unsigned int)
KCCL_MIN_AND_MAX(long, unsigned long)
KCCL_MIN_AND_MAX(long long, unsigned long long)
#undef KCCL_MIN_AND_MAX
KCCL_WORD double min(float a, double b) { return min(static_cast<double>(a), b); }
KCCL_WORD double min(double a, float b) { return min(a, static_cast<double>(b)); }
KCCL_WORD double max(float a, double b) { return max(static_cast<double>(a), b); }
KCCL_WORD double max(double a, float b) { return max(a, static_cast<double>(b)); }

KCCL_WORD float rsqrtf(float x) { return 1.0f / __builtin_sqrtf(x); }
KCCL_WORD double rsqrt(double x) { return 1.0 / __builtin_sqrt(x); }
KCCL_WORD float __expf(float x) { return expf(x); }
KCCL_WORD float __logf(float x) { return logf(x); }
KCCL_WORD float __fdividef(float x, float y) { return x / y; }
KCCL_WORD float __frcp_rn(float x) { return 1.0f / x; }
KCCL_WORD float __fsqrt_rn(float x) { return __builtin_sqrtf(x); }
KCCL_WORD float __fadd_rn(float x, float y) { return x + y; }
KCCL_WORD float __fmul_rn(float x, float y) { return x * y; }
KCCL_WORD float __fmaf_rn(float x, float y, float z) { return __builtin_fmaf(x, y, z); }
KCCL_WORD int __float2int_rn(float x) { return static_cast<int>(__builtin_rintf(x)); }
KCCL_WORD int __float2int_rz(float x) { return static_cast<int>(x); }
KCCL_WORD float __int2float_rn(int x) { return static_cast<float>(x); }
KCCL_WORD int __float_as_int(float x) { return kccl::platform::bit_cast<int>(x); }
KCCL_WORD unsigned int __float_as_uint(float x) {
    return kccl::platform::bit_cast<unsigned int>(x);
}
KCCL_WORD float __int_as_float(int x) { return kccl::platform::bit_cast<float>(x); }
KCCL_WORD float __uint_as_float(unsigned int x) { return kccl::platform::bit_cast<float>(x); }
KCCL_WORD int __popc(unsigned int x) { return __builtin_popcount(x); }
KCCL_WORD int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
KCCL_WORD int __clz(int x) { return x == 0 ? 32 : __builtin_clz(static_cast<unsigned int>(x)); }
KCCL_WORD int __ffs(int x) { return __builtin_ffs(x); }
KCCL_WORD int __ffsll(long long x) { return __builtin_ffsll(x); }
