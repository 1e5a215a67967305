// All that differs between the targets, except memory accesses (mem.cuh): qualifiers, the numbers
// of threads and blocks, synchronisation inside a block. A block is a whole number of warps.
//
//   cuda   nvcc or NVRTC           hip    clang for amdgcn, hipRTC
//   host   any C++20 compiler: a rank is a process or a thread, a block is one OS thread
//   sim    g++ or clang: every GPU thread is a fiber of the simulator in csrc/sim
//
// All other headers, except mem.cuh and targets/, are the same text on every target.
#pragma once

#if defined(__CUDACC__)
#define KCCL_TARGET_CUDA 1
#elif defined(__HIP__)
#define KCCL_TARGET_HIP 1
#elif defined(KCCL_TARGET_SIM)
#include "targets/sim_device.h"
#else
#include "targets/host_floats.h"
#include "targets/host_grid.h"
#define KCCL_TARGET_HOST 1
#endif

// ---- Integer types: run-time compilers have no system headers -------------------------------
#if !defined(__CUDACC_RTC__) && !defined(KCCL_TARGET_HIP)
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
// KCCL_KERNEL_OF(n): a kernel of at most n threads a block, so that a thread may use more registers
// KCCL_CONSTEXPR: a function that device code and constant expressions may call
// KCCL_UNROLL: unrolls the next loop on GPUs, so that arrays that it indexes can be registers
#if defined(KCCL_TARGET_CUDA)
#define KCCL_CONSTEXPR __host__ __device__ constexpr
#define KCCL_DEVICE __device__ __forceinline__
#define KCCL_INLINED  // stands behind a lambda's parameters; on CPUs it forces inlining
// Inlined although it is cold: around a call the hot path's registers would be spilled.
#define KCCL_DEVICE_COLD KCCL_DEVICE
#define KCCL_DEVICE_SHARED KCCL_DEVICE
#define KCCL_KERNEL __global__
#define KCCL_KERNEL_OF(threads) __global__ __launch_bounds__(threads, 1)
#define KCCL_KERNEL_PARAM(type) const __grid_constant__ type
#define KCCL_INDEPENDENT
#define KCCL_UNROLL _Pragma("unroll")
#elif defined(KCCL_TARGET_HIP)
#define KCCL_CONSTEXPR constexpr  // clang lets device code call it too
#define KCCL_DEVICE __attribute__((device)) inline __attribute__((always_inline))
#define KCCL_INLINED
#define KCCL_DEVICE_COLD __attribute__((device)) inline __attribute__((noinline))
#define KCCL_DEVICE_SHARED KCCL_DEVICE
#define KCCL_KERNEL __attribute__((global))
#define KCCL_KERNEL_OF(threads) __attribute__((global, amdgpu_flat_work_group_size(1, threads)))
#define KCCL_KERNEL_PARAM(type) const type
#define KCCL_INDEPENDENT
#define KCCL_UNROLL _Pragma("unroll")
#elif defined(KCCL_TARGET_SIM)
#define KCCL_CONSTEXPR constexpr
#define KCCL_DEVICE inline __attribute__((always_inline, no_sanitize("alignment")))  // mem.cuh
#define KCCL_INLINED __attribute__((always_inline))
#define KCCL_DEVICE_COLD static __attribute__((noinline, cold, unused))
#define KCCL_DEVICE_SHARED static __attribute__((noinline, unused))
#define KCCL_KERNEL [[maybe_unused]] static
#define KCCL_KERNEL_OF(threads) KCCL_KERNEL
#define KCCL_KERNEL_PARAM(type) const type&
#define KCCL_INDEPENDENT
#define KCCL_UNROLL
#else
#define KCCL_CONSTEXPR constexpr
// Always inlined: units that are compiled for different instruction sets must share no symbol.
#define KCCL_DEVICE inline __attribute__((always_inline))
#define KCCL_INLINED __attribute__((always_inline))
#define KCCL_DEVICE_COLD static __attribute__((noinline, cold, unused))
// Not inlined, so that all kernels of a translation unit share one copy of the function.
#define KCCL_DEVICE_SHARED static __attribute__((noinline))
// Internal linkage, because every instruction set has its own copy.
#define KCCL_KERNEL [[maybe_unused]] static
#define KCCL_KERNEL_OF(threads) KCCL_KERNEL
#define KCCL_KERNEL_PARAM(type) const type&
#define KCCL_UNROLL
// Promises the compiler that no two turns of the next loop touch the same element.
#if defined(__clang__)
#define KCCL_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#else
#define KCCL_INDEPENDENT _Pragma("GCC ivdep")
#endif
#endif

// platform::dynamic_shared(): returns the block's dynamic shared memory, aligned to 128 bytes. Its
// size is given at launch; on the host target it is kDynamicSharedBytes.
//
// KCCL_BLOCK_SHARED(T, name): declares `T& name`, one T in block-shared memory, not initialised. In
// functions only.
#if defined(KCCL_TARGET_CUDA)
#define KCCL_BLOCK_SHARED(type, name) __shared__ type name
#elif defined(KCCL_TARGET_HIP)
#define KCCL_BLOCK_SHARED(type, name) static __attribute__((shared)) type name
#elif defined(KCCL_TARGET_SIM)
#define KCCL_BLOCK_SHARED(type, name)         \
    static const char name##_declaration = 0; \
    type& name = *static_cast<type*>(         \
        kccl_sim_engine->shared(&name##_declaration, sizeof(type), alignof(type)))
#else
#define KCCL_BLOCK_SHARED(type, name) type name
#endif

namespace kccl::platform {

#if defined(KCCL_TARGET_CUDA)

constexpr uint32_t kWarpSize = 32;
// The most counters of grid_sync. If it is not 1, comm.grid_counters says how many are used.
constexpr uint32_t kGridCounters = 1;
// How many times a waiting thread polls its counter before it pauses (grid.cuh).
constexpr uint32_t kGridPolls = 1;
// Whether the target is plain C++ on a CPU, where a coop is one thread.
constexpr bool kCpu = false;
// Whether ranks check that they make the same call, by what they tell each other (same_call.cuh).
constexpr bool kComparesCalls = false;
// While an object lives, its thread rounds floats to nearest. Only CPUs have other modes.
struct DefaultFloats {};
// Whether in_rounds() (payload.cuh) has a path of its own for calls of one round.
constexpr bool kPeels = true;
// Whether in_rounds() calls Channel::expect_end() in its loop.
constexpr bool kExpectsEnd = true;

KCCL_DEVICE uint32_t thread_in_block() { return threadIdx.x; }
KCCL_DEVICE uint32_t threads_per_block() { return blockDim.x; }
KCCL_DEVICE uint32_t block_in_grid() { return blockIdx.x; }
KCCL_DEVICE uint32_t blocks_per_grid() { return gridDim.x; }
KCCL_DEVICE void sync_block() { __syncthreads(); }
KCCL_DEVICE bool sync_block_any(bool mine) { return __syncthreads_or(mine); }
KCCL_DEVICE void sync_warp() { __syncwarp(); }
KCCL_DEVICE bool warp_any(bool mine) { return __any_sync(0xffffffffu, mine); }
KCCL_DEVICE uint64_t warp_ballot(bool mine) { return __ballot_sync(0xffffffffu, mine); }
KCCL_DEVICE uint32_t shuffle_word(uint32_t word, uint32_t source_lane) {
    return __shfl_sync(0xffffffffu, word, source_lane);
}
KCCL_DEVICE uint8_t* dynamic_shared() {
    extern __shared__ __align__(128) uint8_t kccl_dynamic_shared[];
    return kccl_dynamic_shared;
}

#elif defined(KCCL_TARGET_HIP)

constexpr uint32_t kWarpSize = 64;
constexpr uint32_t kGridCounters = 8;  // as many as CDNA3 has dies
constexpr uint32_t kGridPolls = 4;
constexpr bool kCpu = false;
constexpr bool kComparesCalls = false;
struct DefaultFloats {};
constexpr bool kPeels = false;
constexpr bool kExpectsEnd = false;  // because registers would spill

KCCL_DEVICE uint32_t thread_in_block() { return __builtin_amdgcn_workitem_id_x(); }
KCCL_DEVICE uint32_t threads_per_block() { return __builtin_amdgcn_workgroup_size_x(); }
KCCL_DEVICE uint32_t block_in_grid() { return __builtin_amdgcn_workgroup_id_x(); }
KCCL_DEVICE uint32_t blocks_per_grid() {
    return __builtin_amdgcn_grid_size_x() / __builtin_amdgcn_workgroup_size_x();
}
// Waits until all vector accesses of this wave to global memory are complete.
KCCL_DEVICE void await_accesses() {
    __builtin_amdgcn_s_waitcnt(0x0f70);  // vmcnt(0); the other counters may have any value
}
// The fences are here because a bare s_barrier orders no memory. The explicit wait is here because
// clang emits none before the barrier, so this wave's stores could still be on their way, and a
// later release by another wave waits for that wave's own stores only.
KCCL_DEVICE void sync_block() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    await_accesses();
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
KCCL_DEVICE uint64_t warp_ballot(bool mine) { return __builtin_amdgcn_ballot_w64(mine); }
KCCL_DEVICE bool warp_any(bool mine) { return warp_ballot(mine) != 0; }
KCCL_DEVICE uint32_t shuffle_word(uint32_t word, uint32_t source_lane) {
    return __builtin_amdgcn_ds_bpermute(source_lane * 4, word);
}
// Patterns by which DPP instructions move values between lanes, without memory. 16 lanes are a row.
enum LaneMove {
    kLanePairs = 0xb1,         // each four lanes get the values of their lanes 1 0 3 2
    kLanePairsOfPairs = 0x4e,  // each four lanes: 2 3 0 1
    kLaneOddOfPair = 0xf5,     // each four lanes: 1 1 3 3
    kMirrorHalfRow = 0x141,    // reverses the 8 lanes of each half row
    kMirrorRow = 0x140,        // reverses the 16 lanes of each row
    kToNextRow = 0x142,        // copies the last lane of a row to all lanes of the next row
    kToUpperRows = 0x143       // copies lane 31 to lanes 32 to 63
};
// Moves values between lanes. A lane to which no value is moved keeps its own.
template <LaneMove MOVE>
KCCL_DEVICE float move_lanes(float value) {
    const int bits = __builtin_bit_cast(int, value);
    return __builtin_bit_cast(
        float, __builtin_amdgcn_update_dpp(bits, bits, MOVE, /*rows*/ 0xf, /*banks*/ 0xf, false));
}
KCCL_DEVICE float lane_of(float value, uint32_t lane) {
    return __builtin_bit_cast(
        float, __builtin_amdgcn_readlane(__builtin_bit_cast(int, value), static_cast<int>(lane)));
}
// Each wave stores its vote in a word of its own, so no word has to be cleared first.
KCCL_DEVICE bool sync_block_any(bool mine) {
    constexpr uint32_t kMostWaves = 16;
    static __attribute__((shared)) uint32_t votes[kMostWaves];
    const bool wave_any = warp_any(mine);
    const uint32_t num_waves = threads_per_block() / kWarpSize;
    const uint32_t lane = thread_in_block() % kWarpSize;
    if (num_waves <= 1) {
        // The block has one wave, so it waits for no other wave.
        __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
        await_accesses();
        __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
        return wave_any;
    }
    if (lane == 0) {
        __scoped_atomic_store_n(&votes[thread_in_block() / kWarpSize], wave_any, __ATOMIC_RELAXED,
                                __MEMORY_SCOPE_WRKGRP);
    }
    sync_block();
    const uint32_t vote = lane < num_waves ? __scoped_atomic_load_n(&votes[lane], __ATOMIC_RELAXED,
                                                                    __MEMORY_SCOPE_WRKGRP)
                                           : 0;
    const bool result = warp_any(vote != 0);
    sync_block();
    return result;
}
KCCL_DEVICE void sync_warp() {
    __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
    __builtin_amdgcn_wave_barrier();
}
KCCL_DEVICE uint8_t* dynamic_shared() {
    extern __attribute__((shared)) __attribute__((aligned(128))) uint8_t kccl_dynamic_shared[];
    return kccl_dynamic_shared;
}

#elif defined(KCCL_TARGET_SIM)

constexpr uint32_t kWarpSize = KCCL_SIM_WARP_SIZE;
constexpr uint32_t kGridCounters = kWarpSize == 64 ? 8 : 1;
constexpr uint32_t kGridPolls = kWarpSize == 64 ? 4 : 1;
constexpr bool kCpu = false;
constexpr bool kComparesCalls = true;
struct DefaultFloats {};
constexpr bool kPeels = false;
constexpr bool kExpectsEnd = true;

KCCL_DEVICE uint32_t thread_in_block() { return (*kccl_sim_engine->self)->thread_in_block; }
KCCL_DEVICE uint32_t threads_per_block() { return (*kccl_sim_engine->self)->threads_per_block; }
KCCL_DEVICE uint32_t block_in_grid() { return (*kccl_sim_engine->self)->block_in_grid; }
KCCL_DEVICE uint32_t blocks_per_grid() { return (*kccl_sim_engine->self)->blocks_per_grid; }
KCCL_DEVICE void sync_block() { kccl_sim_engine->meet_block(1); }
KCCL_DEVICE bool sync_block_any(bool mine) { return kccl_sim_engine->block_any(mine) != 0; }
KCCL_DEVICE void sync_warp() { kccl_sim_engine->meet_warp(); }
KCCL_DEVICE uint64_t warp_ballot(bool mine) { return kccl_sim_engine->warp_ballot(mine); }
KCCL_DEVICE bool warp_any(bool mine) { return warp_ballot(mine) != 0; }
KCCL_DEVICE uint32_t shuffle_word(uint32_t word, uint32_t source_lane) {
    return static_cast<uint32_t>(kccl_sim_engine->shuffle(word, source_lane));
}
KCCL_DEVICE uint8_t* dynamic_shared() {
    return static_cast<uint8_t*>(kccl_sim_engine->dynamic_shared());
}

#else

constexpr uint32_t kWarpSize = 1;
constexpr uint32_t kGridCounters = 1;
constexpr uint32_t kGridPolls = 1;
constexpr bool kCpu = true;
constexpr bool kComparesCalls = true;
using host::DefaultFloats;
constexpr bool kPeels = false;
constexpr bool kExpectsEnd = true;

KCCL_DEVICE uint32_t thread_in_block() { return 0; }
KCCL_DEVICE uint32_t threads_per_block() { return 1; }
using host::block_in_grid;
using host::blocks_per_grid;
KCCL_DEVICE void sync_block() {}
KCCL_DEVICE bool sync_block_any(bool mine) { return mine; }
KCCL_DEVICE void sync_warp() {}
KCCL_DEVICE bool warp_any(bool mine) { return mine; }
KCCL_DEVICE uint64_t warp_ballot(bool mine) { return mine; }
KCCL_DEVICE uint32_t shuffle_word(uint32_t word, uint32_t) { return word; }
// The bytes of dynamic shared memory: as many as a block of an H100 may have, 227 KiB. Each OS
// thread is a block, and has such memory of its own.
constexpr uint64_t kDynamicSharedBytes = 232448;
[[maybe_unused]] static uint8_t* dynamic_shared() {
    alignas(128) static thread_local uint8_t memory[kDynamicSharedBytes];
    return memory;
}

#endif

// Tells the simulator which call the thread makes from here on; does nothing on other targets.
// `state` identifies the communicator.
KCCL_DEVICE void enter_call([[maybe_unused]] uint64_t state, [[maybe_unused]] uint32_t kernel,
                            [[maybe_unused]] int32_t channel, [[maybe_unused]] uint32_t epoch) {
#if defined(KCCL_TARGET_SIM)
    kccl_sim_engine->enter_call(state, kernel, channel, epoch);
#endif
}

// Returns a reference to the kernel's first parameter where the launch has put it. With a reference
// to `parameter` itself, AMD's compiler would first copy it to memory, once for each thread.
template <class T>
KCCL_DEVICE const T& first_parameter([[maybe_unused]] const T& parameter) {
#if defined(KCCL_TARGET_HIP)
    return *(const T*)__builtin_amdgcn_kernarg_segment_ptr();
#else
    return parameter;
#endif
}

// Does for the kernel's second parameter what first_parameter() does for `first`.
template <class First, class T>
KCCL_DEVICE const T& second_parameter([[maybe_unused]] const First& first,
                                      [[maybe_unused]] const T& parameter) {
#if defined(KCCL_TARGET_HIP)
    constexpr uint32_t kAt = (sizeof(First) + alignof(T) - 1) / alignof(T) * alignof(T);
    return *(const T*)((const char*)__builtin_amdgcn_kernarg_segment_ptr() + kAt);
#else
    return parameter;
#endif
}

// Copies between two variables of this thread, to change a type. It is no access to memory.
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

// Returns the square root, rounded to nearest on every target.
KCCL_DEVICE float square_root(float value) {
#if defined(KCCL_TARGET_CUDA)
    return __fsqrt_rn(value);
#else
    return __builtin_sqrtf(value);
#endif
}

// Returns the value that thread `source_lane` passed. Called by all threads of the warp.
template <class T>
KCCL_DEVICE T shuffle(T value, uint32_t source_lane) {
    static_assert(sizeof(T) % 4 == 0, "whole words");
    uint32_t words[sizeof(T) / 4];
    copy_bytes(words, &value, sizeof(T));
    for (uint32_t& word : words) word = shuffle_word(word, source_lane);
    copy_bytes(&value, words, sizeof(T));
    return value;
}

// Reduces by f the values of each group of NUM neighbouring threads of a warp, 4 or all. Returns
// the group's result in each thread. f must be commutative. The order is fixed: pairs, then pairs
// of pairs. Called by all threads of the warp.
template <uint32_t NUM, class F>
KCCL_DEVICE float reduce_lanes(float value, F f) {
    static_assert(NUM == 4 || NUM == kWarpSize, "what AMD's lanes can move at once");
#if defined(KCCL_TARGET_HIP)
    // All lanes of a reduced group hold its value, so a mirrored lane is as good as a neighbour.
    value = f(value, move_lanes<kLanePairs>(value));
    value = f(value, move_lanes<kLanePairsOfPairs>(value));
    if constexpr (NUM == kWarpSize) {
        value = f(value, move_lanes<kMirrorHalfRow>(value));
        value = f(value, move_lanes<kMirrorRow>(value));
        value = f(value, move_lanes<kToNextRow>(value));
        value = f(value, move_lanes<kToUpperRows>(value));
        value = lane_of(value, kWarpSize - 1);
    }
#else
    KCCL_UNROLL
    for (uint32_t step = 1; step < NUM; step *= 2) {
        value = f(value, shuffle(value, (thread_in_block() % kWarpSize) ^ step));
    }
#endif
    return value;
}

}  // namespace kccl::platform

#if defined(KCCL_TARGET_SIM) || defined(KCCL_HOST_GRID)
#include "targets/sim_cuda.h"
#endif
