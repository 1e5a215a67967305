// mem.cuh on AMD GPUs: clang's scoped atomics, from which the compiler derives the cache bits.
#pragma once

namespace kccl::mem {

constexpr int builtin_order(Order order) {
    return order == Order::kRelaxed   ? __ATOMIC_RELAXED
           : order == Order::kAcquire ? __ATOMIC_ACQUIRE
           : order == Order::kRelease ? __ATOMIC_RELEASE
           : order == Order::kAcqRel  ? __ATOMIC_ACQ_REL
                                      : __ATOMIC_SEQ_CST;
}

constexpr int builtin_scope(Scope scope) {
    return scope == Scope::kBlock    ? __MEMORY_SCOPE_WRKGRP
           : scope == Scope::kDevice ? __MEMORY_SCOPE_DEVICE
                                     : __MEMORY_SCOPE_SYSTEM;
}

// Returns an address in the form that the builtins take. Memory that other blocks see is global,
// and the address space says so. Without it the compiler would emit flat_load, which waits for
// block-shared memory too; global_load waits for global memory alone.
template <Scope scope, class T>
KCCL_DEVICE auto where(T* address) {
    if constexpr (scope == Scope::kBlock)
        return address;
    else
        return (__attribute__((address_space(1))) T*)address;
}

template <Order order, Scope scope, class T>
KCCL_DEVICE T load(const T* address) {
    return __scoped_atomic_load_n(where<scope>(address), builtin_order(order),
                                  builtin_scope(scope));
}

// Makes visible to `scope` what this thread wrote before, and what it has seen of others' writes.
// The wait is written down because some compilers drop their own behind the write-back of caches
// (https://github.com/llvm/llvm-project/pull/178316), so that a flag could overtake its data. The
// builtin accepts order and scope as literals only.
template <Scope scope>
KCCL_DEVICE void release() {
    if constexpr (scope == Scope::kBlock) {
        __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
        return;
    } else if constexpr (scope == Scope::kDevice) {
        __builtin_amdgcn_fence(__ATOMIC_RELEASE, "agent");
    } else {
        __builtin_amdgcn_fence(__ATOMIC_RELEASE, "");
    }
    platform::await_accesses();
}

template <Order order, Scope scope, class T>
KCCL_DEVICE void store(T* address, T value) {
    static_assert(order == Order::kRelaxed || order == Order::kRelease, "releases or is relaxed");
    if constexpr (order == Order::kRelease) release<scope>();
    __scoped_atomic_store_n(where<scope>(address), value, __ATOMIC_RELAXED, builtin_scope(scope));
}

KCCL_DEVICE bool claim(uint32_t* address, uint32_t value) {
    uint32_t seen = 0;
    return __scoped_atomic_compare_exchange_n(where<Scope::kDevice>(address), &seen, value, false,
                                              __ATOMIC_RELAXED, __ATOMIC_RELAXED,
                                              __MEMORY_SCOPE_DEVICE);
}

template <Order order, Scope scope>
KCCL_DEVICE void add(uint32_t* address, uint32_t value) {
    static_assert(order == Order::kRelaxed || order == Order::kRelease, "releases or is relaxed");
    if constexpr (order == Order::kRelease) release<scope>();
    (void)__scoped_atomic_fetch_add(where<scope>(address), value, __ATOMIC_RELAXED,
                                    builtin_scope(scope));
}

// kAcqRel and kSeqCst have the same instructions here: all accesses before the fence have been
// performed, and none behind it has begun.
template <Order order, Scope scope>
KCCL_DEVICE void fence() {
    static_assert(order != Order::kRelaxed, "a fence orders something");
    if constexpr (order != Order::kAcquire) release<scope>();
    if constexpr (order == Order::kRelease)
        return;
    else if constexpr (scope == Scope::kBlock)
        __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
    else if constexpr (scope == Scope::kDevice)
        __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "agent");
    else
        __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "");
}

template <Scope scope>
KCCL_DEVICE Packet load_packet(const Packet* address) {
    return {{load<Order::kRelaxed, scope>(&address->half[0]),
             load<Order::kRelaxed, scope>(&address->half[1])}};
}

template <Scope scope>
KCCL_DEVICE void store_packet(Packet* address, Packet packet) {
    store<Order::kRelaxed, scope>(&address->half[0], packet.half[0]);
    store<Order::kRelaxed, scope>(&address->half[1], packet.half[1]);
}

// Packets of system scope bypass all caches. So a packet that the memory has acknowledged is
// visible to all, and no cache must be written back or invalidated. Other waves of the block have
// waited for theirs in sync_block(). The signal fences keep the compiler from moving accesses
// across.
KCCL_DEVICE void fence_packets() {
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
    platform::await_accesses();
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
}

// Waits for this wave's stores, because a later release by another wave waits for that wave's
// stores only, and a meeting waits for none.
KCCL_DEVICE void finish_stores() {
    __atomic_signal_fence(__ATOMIC_SEQ_CST);
    platform::await_accesses();
}

// Loads up to 16 bytes of global memory that are read once. The load is nontemporal, so that it
// evicts no data from the caches that is read again.
template <class T>
KCCL_DEVICE T load_streamed(const T* address) {
    if constexpr (sizeof(T) < 8) {
        return __builtin_nontemporal_load((const __attribute__((address_space(1))) T*)address);
    } else {
        using Words = uint32_t __attribute__((ext_vector_type(sizeof(T) / sizeof(uint32_t))));
        static_assert(sizeof(T) == sizeof(Words), "the wide loads");
        const auto* words = (const __attribute__((address_space(1))) Words*)address;
        return platform::bit_cast<T>(__builtin_nontemporal_load(words));
    }
}

// Makes mem.cuh include mem_copies.cuh.
#define KCCL_MEM_COPIES_THROUGH_REGISTERS 1

KCCL_DEVICE uint32_t add_shared(uint32_t* word, uint32_t value) {
    return __scoped_atomic_add_fetch(word, value, __ATOMIC_ACQ_REL, __MEMORY_SCOPE_WRKGRP);
}

KCCL_DEVICE uint32_t load_shared(const uint32_t* word) {
    return load<Order::kAcquire, Scope::kBlock>(word);
}

KCCL_DEVICE void store_shared(uint32_t* word, uint32_t value) {
    store<Order::kRelease, Scope::kBlock>(word, value);
}

// Returns a * b, rounded by itself: never fused with a sum.
template <class T>
KCCL_DEVICE T product(T a, T b) {
#pragma clang fp contract(off)
    return a * b;
}

KCCL_DEVICE float float_from_half(uint16_t bits) {
    return static_cast<float>(__builtin_bit_cast(_Float16, bits));
}

KCCL_DEVICE uint16_t half_from_float(float value) {
    return __builtin_bit_cast(uint16_t, static_cast<_Float16>(value));
}

// Rounds to nearest even by adding just under half of the dropped part's unit; `value` is not NaN.
KCCL_DEVICE uint16_t bfloat16_from_float(float value) {
    const uint32_t bits = platform::bit_cast<uint32_t>(value);
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

// Converts two numbers at a time, the first one into the lower half. The result for NaN is
// undefined.
KCCL_DEVICE uint32_t halves_from_floats(float first, float second) {
    return half_from_float(first) | static_cast<uint32_t>(half_from_float(second)) << 16;
}

KCCL_DEVICE uint32_t bfloat16s_from_floats(float first, float second) {
    return bfloat16_from_float(first) | static_cast<uint32_t>(bfloat16_from_float(second)) << 16;
}

// Reads the counter of constant rate, 100 MHz.
KCCL_DEVICE uint64_t clock_ns() { return __builtin_amdgcn_s_memrealtime() * 10; }
template <uint32_t NUM>
KCCL_DEVICE void take_registers() {}
template <uint32_t NUM>
KCCL_DEVICE void give_registers() {}

constexpr bool kMeetsInHardware = false;
KCCL_DEVICE bool meet_any(uint32_t, bool mine) { return mine; }

KCCL_DEVICE uint64_t clock_ticks() { return __builtin_amdgcn_s_memtime(); }

// Bits of a hardware register, as s_getreg_b32 names them.
constexpr int register_bits(int number, int first, int count) {
    return number | first << 6 | (count - 1) << 11;
}
constexpr int kPlaceOfWave = 4, kDieOfWave = 20;  // the registers HW_ID and XCC_ID of CDNA3

KCCL_DEVICE uint32_t die_id() { return __builtin_amdgcn_s_getreg(register_bits(kDieOfWave, 0, 4)); }
// The register has four bits for the compute unit, one for its array and three for its engine.
KCCL_DEVICE uint32_t unit_id() {
    const uint32_t within = __builtin_amdgcn_s_getreg(register_bits(kPlaceOfWave, 8, 8));
    return die_id() << 8 | within;
}

KCCL_DEVICE void await_kernels_before() {}
KCCL_DEVICE void launch_dependents() {}
KCCL_DEVICE void prefetch(const void*) {}

KCCL_DEVICE uint32_t forget(uint32_t value) {
    asm volatile("" : "+v"(value));
    return value;
}
KCCL_DEVICE uint32_t forget_uniform(uint32_t value) {
    asm volatile("" : "+s"(value));
    return value;
}
KCCL_DEVICE uint32_t forget_index(uint32_t value) { return value; }

template <class T>
KCCL_DEVICE T keep(T value) {
    return value;
}

KCCL_DEVICE void poll_pause() { __builtin_amdgcn_s_sleep(1); }

KCCL_DEVICE int read_peer(uint64_t, int, void*, uint64_t, uint64_t) { return -1; }
KCCL_DEVICE bool may_read_peer(uint64_t, int) { return false; }
KCCL_DEVICE void send_message(uint64_t, const void*, uint64_t, int, int) {}
KCCL_DEVICE void receive_message(uint64_t, void*, uint64_t, int, int) {}

}  // namespace kccl::mem
