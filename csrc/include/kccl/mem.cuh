// Every load, store and copy on memory that another thread can see, by order and scope; and the few
// register instructions that C++ cannot spell. The only file with inline assembly.
//
//   load<Order, Scope>(p)       store<Order, Scope>(p, v)      32 and 64 bits, naturally aligned
//   load_packet / store_packet  two 64-bit halves, each single-copy atomic, relaxed, system scope
//   claim(p, v)                 0 becomes v; true for the one thread that did it; relaxed
//   load_plain / store_plain    no order: memory that a signal already hands over
//   read_peer                   a plain copy from another process's own memory; CPUs only
//   stage                       a copy to where a peer has read: see there
//   copy                        the share of thread `index` of `size` in a plain copy
//
// clock_ns, poll_pause and idle are what a thread does while it polls: idle() yields to other
// ranks, says which of the missing ones are gone, and by its KcclStatus whether the user
// interrupted.
//
// Order says what else becomes visible with this access; Scope says to whom: the block, the device,
// or the system (peers and the CPU).
#pragma once

#include "abi.h"

#if defined(KCCL_TARGET_HOST)
#include <string.h>

#include "../../host/idle.h"
#endif

namespace kccl::mem {

enum class Order { kRelaxed, kAcquire, kRelease };
enum class Scope { kBlock, kDevice, kSystem };

// Payload and flag twice: {data32, flag32} in each half.
struct Packet {
    uint64_t half[2];
};

#if defined(KCCL_TARGET_CUDA)

#define KCCL_MEM_LOAD(order, scope, bits, reg)                       \
    asm volatile("ld." order "." scope ".global.u" bits " %0, [%1];" \
                 : "=" reg(value)                                    \
                 : "l"(address)                                      \
                 : "memory")
#define KCCL_MEM_STORE(order, scope, bits, reg)                                                 \
    asm volatile("st." order "." scope ".global.u" bits " [%0], %1;" ::"l"(address), reg(value) \
                 : "memory")
#define KCCL_MEM_BY_SIZE(access, order, scope) \
    do {                                       \
        if constexpr (sizeof(T) == 4)          \
            access(order, scope, "32", "r");   \
        else                                   \
            access(order, scope, "64", "l");   \
    } while (0)
#define KCCL_MEM_BY_SCOPE(access, order)            \
    do {                                            \
        if constexpr (scope == Scope::kBlock)       \
            KCCL_MEM_BY_SIZE(access, order, "cta"); \
        else if constexpr (scope == Scope::kDevice) \
            KCCL_MEM_BY_SIZE(access, order, "gpu"); \
        else                                        \
            KCCL_MEM_BY_SIZE(access, order, "sys"); \
    } while (0)

template <Order order, Scope scope, class T>
KCCL_DEVICE T load(const T* address) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "32 or 64 bits");
    static_assert(order != Order::kRelease, "a load acquires or is relaxed");
    T value;
    if constexpr (order == Order::kAcquire)
        KCCL_MEM_BY_SCOPE(KCCL_MEM_LOAD, "acquire");
    else
        KCCL_MEM_BY_SCOPE(KCCL_MEM_LOAD, "relaxed");
    return value;
}

template <Order order, Scope scope, class T>
KCCL_DEVICE void store(T* address, T value) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "32 or 64 bits");
    static_assert(order != Order::kAcquire, "a store releases or is relaxed");
    if constexpr (order == Order::kRelease)
        KCCL_MEM_BY_SCOPE(KCCL_MEM_STORE, "release");
    else
        KCCL_MEM_BY_SCOPE(KCCL_MEM_STORE, "relaxed");
}

#undef KCCL_MEM_LOAD
#undef KCCL_MEM_STORE
#undef KCCL_MEM_BY_SIZE
#undef KCCL_MEM_BY_SCOPE

KCCL_DEVICE Packet load_packet(const Packet* address) {
    Packet packet;
    asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];"
                 : "=l"(packet.half[0]), "=l"(packet.half[1])
                 : "l"(address)
                 : "memory");
    return packet;
}

KCCL_DEVICE void store_packet(Packet* address, Packet packet) {
    asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(address), "l"(packet.half[0]),
                 "l"(packet.half[1])
                 : "memory");
}

KCCL_DEVICE bool claim(uint32_t* address, uint32_t value) {
    uint32_t seen;
    asm volatile("atom.relaxed.gpu.global.cas.b32 %0, [%1], 0, %2;"
                 : "=r"(seen)
                 : "l"(address), "r"(value)
                 : "memory");
    return seen == 0;
}

KCCL_DEVICE float float_from_half(uint16_t bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// Rounds to nearest even; `value` is not NaN.
KCCL_DEVICE uint16_t half_from_float(float value) {
    uint16_t bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

KCCL_DEVICE uint64_t clock_ns() {
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

KCCL_DEVICE void poll_pause() {}

KCCL_DEVICE bool read_peer(uint64_t, int, void*, uint64_t, uint64_t) { return false; }

KCCL_DEVICE uint32_t idle(uint64_t, uint64_t, uint32_t, uint32_t*) { return kKcclOk; }

#else  // GCC's and clang's atomic builtins cover AMD GPUs and CPUs

constexpr int builtin_order(Order order) {
    return order == Order::kAcquire   ? __ATOMIC_ACQUIRE
           : order == Order::kRelease ? __ATOMIC_RELEASE
                                      : __ATOMIC_RELAXED;
}

#if defined(KCCL_TARGET_HIP)

constexpr int builtin_scope(Scope scope) {
    return scope == Scope::kBlock    ? __MEMORY_SCOPE_WRKGRP
           : scope == Scope::kDevice ? __MEMORY_SCOPE_DEVICE
                                     : __MEMORY_SCOPE_SYSTEM;
}

template <Order order, Scope scope, class T>
KCCL_DEVICE T load(const T* address) {
    return __scoped_atomic_load_n(address, builtin_order(order), builtin_scope(scope));
}

template <Order order, Scope scope, class T>
KCCL_DEVICE void store(T* address, T value) {
    __scoped_atomic_store_n(address, value, builtin_order(order), builtin_scope(scope));
}

KCCL_DEVICE bool claim(uint32_t* address, uint32_t value) {
    uint32_t seen = 0;
    return __scoped_atomic_compare_exchange_n(address, &seen, value, false, __ATOMIC_RELAXED,
                                              __ATOMIC_RELAXED, __MEMORY_SCOPE_DEVICE);
}

KCCL_DEVICE float float_from_half(uint16_t bits) {
    return static_cast<float>(__builtin_bit_cast(_Float16, bits));
}

KCCL_DEVICE uint16_t half_from_float(float value) {
    return __builtin_bit_cast(uint16_t, static_cast<_Float16>(value));
}

// The constant 100 MHz counter.
KCCL_DEVICE uint64_t clock_ns() { return __builtin_amdgcn_s_memrealtime() * 10; }

KCCL_DEVICE void poll_pause() { __builtin_amdgcn_s_sleep(1); }

KCCL_DEVICE bool read_peer(uint64_t, int, void*, uint64_t, uint64_t) { return false; }

KCCL_DEVICE uint32_t idle(uint64_t, uint64_t, uint32_t, uint32_t*) { return kKcclOk; }

#else  // host: threads and processes share one coherent memory, so every scope is the same

template <Order order, Scope scope, class T>
KCCL_DEVICE T load(const T* address) {
    return __atomic_load_n(address, builtin_order(order));
}

template <Order order, Scope scope, class T>
KCCL_DEVICE void store(T* address, T value) {
    __atomic_store_n(address, value, builtin_order(order));
}

KCCL_DEVICE bool claim(uint32_t* address, uint32_t value) {
    uint32_t seen = 0;
    return __atomic_compare_exchange_n(address, &seen, value, false, __ATOMIC_RELAXED,
                                       __ATOMIC_RELAXED);
}

// In integers and without branches, so that loops over elements become vector code.
KCCL_DEVICE float float_from_half(uint16_t bits) {
    const uint32_t sign = (bits & 0x8000u) << 16;
    const uint32_t magnitude = bits & 0x7fffu;
    const uint32_t normal = (magnitude << 13) + (112u << 23);
    const uint32_t special = (magnitude << 13) | 0x7f800000u;
    const uint32_t subnormal = platform::bit_cast<uint32_t>(
        static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
    const uint32_t value = magnitude >= 0x7c00u ? special : magnitude < 0x400u ? subnormal : normal;
    return platform::bit_cast<float>(value | sign);
}

// Rounds to nearest even; `value` is not NaN.
KCCL_DEVICE uint16_t half_from_float(float value) {
    const uint32_t bits = platform::bit_cast<uint32_t>(value);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & 0x7fffffffu;
    const uint32_t normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - (112u << 23)) >> 13;
    // Adding one half makes the floating-point unit round to multiples of 2^-24, half's least step.
    const uint32_t subnormal =
        platform::bit_cast<uint32_t>(platform::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
    const uint32_t half = magnitude >= 0x477ff000u  ? 0x7c00u
                          : magnitude < 0x38800000u ? subnormal
                                                    : normal;
    return static_cast<uint16_t>(half | sign);
}

KCCL_DEVICE uint64_t clock_ns() { return kccl_host_clock_ns(); }

KCCL_DEVICE void poll_pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb");
#endif
}

KCCL_DEVICE bool read_peer(uint64_t idle_context, int peer, void* to, uint64_t from,
                           uint64_t num_bytes) {
    return kccl_host_read_peer(idle_context, peer, to, from, num_bytes) == 0;
}

KCCL_DEVICE uint32_t idle(uint64_t idle_context, uint64_t waited_ns, uint32_t missing,
                          uint32_t* gone) {
    return kccl_host_idle(idle_context, waited_ns, missing, gone);
}

#endif

// On a CPU pulling calls share channels with calls by packets, and what a peer has pulled must be
// read before it is overwritten: there a packet orders what came before it. On x86 every load and
// store does so anyway.
constexpr Order kPacketLoad = platform::kCpu ? Order::kAcquire : Order::kRelaxed;
constexpr Order kPacketStore = platform::kCpu ? Order::kRelease : Order::kRelaxed;

KCCL_DEVICE Packet load_packet(const Packet* address) {
    return {{load<Order::kRelaxed, Scope::kSystem>(&address->half[0]),
             load<kPacketLoad, Scope::kSystem>(&address->half[1])}};
}

KCCL_DEVICE void store_packet(Packet* address, Packet packet) {
    store<Order::kRelaxed, Scope::kSystem>(&address->half[0], packet.half[0]);
    store<kPacketStore, Scope::kSystem>(&address->half[1], packet.half[1]);
}

#endif

// Why typed on CUDA: NVRTC has no __builtin_memcpy, and memcpy forgets the alignment.
template <class T>
KCCL_DEVICE T load_plain(const T* address) {
#if defined(KCCL_TARGET_CUDA)
    return *address;
#else
    T value;
    __builtin_memcpy(&value, address, sizeof(T));
    return value;
#endif
}

template <class T>
KCCL_DEVICE void store_plain(T* address, T value) {
#if defined(KCCL_TARGET_CUDA)
    *address = value;
#else
    __builtin_memcpy(address, &value, sizeof(T));
#endif
}

KCCL_DEVICE void copy(void* to, const void* from, uint64_t num_bytes, uint32_t index,
                      uint32_t size) {
#if defined(KCCL_TARGET_HOST)
    (void)index;
    (void)size;
    memcpy(to, from, num_bytes);
#else
    struct alignas(16) Line {
        uint64_t word[2];
    };
    auto* out = static_cast<uint8_t*>(to);
    auto* in = static_cast<const uint8_t*>(from);
    const bool aligned =
        ((reinterpret_cast<uint64_t>(out) | reinterpret_cast<uint64_t>(in)) & 15) == 0;
    const uint64_t num_lines = aligned ? num_bytes / sizeof(Line) : 0;
    for (uint64_t i = index; i < num_lines; i += size) {
        reinterpret_cast<Line*>(out)[i] = reinterpret_cast<const Line*>(in)[i];
    }
    for (uint64_t i = num_lines * sizeof(Line) + index; i < num_bytes; i += size) out[i] = in[i];
#endif
}

// As copy(), into lines that peers hold because they read them two calls ago. A CPU asks for them
// ahead of the stores: stores wait in order for their lines, requests do not.
KCCL_DEVICE void stage(void* to, const void* from, uint64_t num_bytes, uint32_t index,
                       uint32_t size) {
#if defined(KCCL_TARGET_HOST)
    (void)index;
    (void)size;
    constexpr uint64_t kLine = 64;
    constexpr uint64_t kAhead = 16 * kLine;
    auto* out = static_cast<uint8_t*>(to);
    auto* in = static_cast<const uint8_t*>(from);
    const uint64_t whole = num_bytes / kLine * kLine;
    for (uint64_t i = 0; i < num_bytes && i < kAhead; i += kLine) __builtin_prefetch(out + i, 1, 3);
    for (uint64_t i = 0; i < whole; i += kLine) {
        if (i + kAhead < num_bytes) __builtin_prefetch(out + i + kAhead, 1, 3);
        __builtin_memcpy(out + i, in + i, kLine);
    }
    __builtin_memcpy(out + whole, in + whole, num_bytes - whole);
#else
    copy(to, from, num_bytes, index, size);
#endif
}

}  // namespace kccl::mem
