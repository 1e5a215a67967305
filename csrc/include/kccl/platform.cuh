// Where the targets differ in everything but memory: qualifiers, who a thread is, synchronisation
// inside a block. Blocks are a whole number of warps.
//
//   cuda   nvcc or NVRTC           hip    clang for amdgcn, hipRTC
//   host   any C++20 compiler: a rank is a process or a thread, a block is one OS thread
//
// Everything above this file and mem.cuh is the same text on every target.
#pragma once

#if defined(__CUDACC__)
#define KCCL_TARGET_CUDA 1
#elif defined(__HIP__)
#define KCCL_TARGET_HIP 1
#else
#define KCCL_TARGET_HOST 1
#endif

// ---- Integer types: run-time compilers have no system headers -------------------------------
#if defined(KCCL_TARGET_HOST) || (defined(KCCL_TARGET_CUDA) && !defined(__CUDACC_RTC__))
#include <stdint.h>
#else
using int8_t = signed char;
using uint8_t = unsigned char;
using int16_t = short;
using uint16_t = unsigned short;
using int32_t = int;
using uint32_t = unsigned int;
using int64_t = long;
using uint64_t = unsigned long;
#endif

// ---- Qualifiers -----------------------------------------------------------------------------
#if defined(KCCL_TARGET_CUDA)
#define KCCL_DEVICE __device__ __forceinline__
#define KCCL_DEVICE_COLD __device__ __noinline__
#define KCCL_DEVICE_SHARED __device__ __forceinline__
#define KCCL_KERNEL __global__
#define KCCL_KERNEL_PARAM(type) const __grid_constant__ type
#define KCCL_INDEPENDENT
#elif defined(KCCL_TARGET_HIP)
#define KCCL_DEVICE __attribute__((device)) inline __attribute__((always_inline))
#define KCCL_DEVICE_COLD __attribute__((device)) inline __attribute__((noinline))
#define KCCL_DEVICE_SHARED KCCL_DEVICE
#define KCCL_KERNEL __attribute__((global))
#define KCCL_KERNEL_PARAM(type) const type
#define KCCL_INDEPENDENT
#else
// Always inlined, so that one translation unit per instruction set emits no shared symbols.
#define KCCL_DEVICE inline __attribute__((always_inline))
#define KCCL_DEVICE_COLD static __attribute__((noinline, cold, unused))
// One copy for all the kernels of a translation unit.
#define KCCL_DEVICE_SHARED static __attribute__((noinline))
// Internal linkage, because every instruction set has its own copy.
#define KCCL_KERNEL [[maybe_unused]] static
#define KCCL_KERNEL_PARAM(type) const type&
// Promises that the iterations of the next loop touch different elements.
#if defined(__clang__)
#define KCCL_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define KCCL_INDEPENDENT _Pragma("GCC ivdep")
#endif
#endif

namespace kccl::platform {

#if defined(KCCL_TARGET_CUDA)

constexpr uint32_t kWarpSize = 32;
constexpr bool kCpu = false;

KCCL_DEVICE uint32_t thread_in_block() { return threadIdx.x; }
KCCL_DEVICE uint32_t threads_per_block() { return blockDim.x; }
KCCL_DEVICE uint32_t block_in_grid() { return blockIdx.x; }
KCCL_DEVICE void sync_block() { __syncthreads(); }
KCCL_DEVICE bool sync_block_any(bool mine) { return __syncthreads_or(mine); }
KCCL_DEVICE void sync_warp() { __syncwarp(); }
KCCL_DEVICE bool warp_any(bool mine) { return __any_sync(0xffffffffu, mine); }

#elif defined(KCCL_TARGET_HIP)

constexpr uint32_t kWarpSize = 64;
constexpr bool kCpu = false;

KCCL_DEVICE uint32_t thread_in_block() { return __builtin_amdgcn_workitem_id_x(); }
KCCL_DEVICE uint32_t threads_per_block() { return __builtin_amdgcn_workgroup_size_x(); }
KCCL_DEVICE uint32_t block_in_grid() { return __builtin_amdgcn_workgroup_id_x(); }
// Why the fences: a bare s_barrier drains nothing, so stores could still be in flight.
KCCL_DEVICE void sync_block() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
KCCL_DEVICE bool warp_any(bool mine) { return __builtin_amdgcn_ballot_w64(mine) != 0; }
KCCL_DEVICE bool sync_block_any(bool mine) {
    static __attribute__((shared)) uint32_t any;
    if (thread_in_block() == 0) any = 0;
    sync_block();
    if (mine) __scoped_atomic_fetch_or(&any, 1u, __ATOMIC_RELAXED, __MEMORY_SCOPE_WRKGRP);
    sync_block();
    const bool result = __scoped_atomic_load_n(&any, __ATOMIC_RELAXED, __MEMORY_SCOPE_WRKGRP) != 0;
    sync_block();
    return result;
}
KCCL_DEVICE void sync_warp() {
    __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
    __builtin_amdgcn_wave_barrier();
}

#else

constexpr uint32_t kWarpSize = 1;
constexpr bool kCpu = true;

KCCL_DEVICE uint32_t thread_in_block() { return 0; }
KCCL_DEVICE uint32_t threads_per_block() { return 1; }
KCCL_DEVICE uint32_t block_in_grid() { return 0; }
KCCL_DEVICE void sync_block() {}
KCCL_DEVICE bool sync_block_any(bool mine) { return mine; }
KCCL_DEVICE void sync_warp() {}
KCCL_DEVICE bool warp_any(bool mine) { return mine; }

#endif

// Between variables of this thread: a change of type, not an access to memory.
KCCL_DEVICE void copy_bytes(void* to, const void* from, uint64_t num_bytes) {
#if defined(KCCL_TARGET_CUDA)
    memcpy(to, from, num_bytes);
#else
    __builtin_memcpy(to, from, num_bytes);
#endif
}

template <class To, class From>
KCCL_DEVICE To bit_cast(const From& from) {
    static_assert(sizeof(To) == sizeof(From), "bit_cast keeps the size");
    To to;
    copy_bytes(&to, &from, sizeof(To));
    return to;
}

}  // namespace kccl::platform
