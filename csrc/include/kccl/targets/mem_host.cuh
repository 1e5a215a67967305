// mem.cuh on CPUs. Threads and processes share one coherent memory, so all scopes are the same.
#pragma once

#include "host_idle.h"
#include "mem_cpu.cuh"

namespace kccl::mem {

KCCL_DEVICE void await_kernels_before() {}
KCCL_DEVICE void launch_dependents() {}

constexpr int builtin_order(Order order) {
    return order == Order::kRelaxed   ? __ATOMIC_RELAXED
           : order == Order::kAcquire ? __ATOMIC_ACQUIRE
           : order == Order::kRelease ? __ATOMIC_RELEASE
           : order == Order::kAcqRel  ? __ATOMIC_ACQ_REL
                                      : __ATOMIC_SEQ_CST;
}

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

template <Order order, Scope scope>
KCCL_DEVICE void add(uint32_t* address, uint32_t value) {
    static_assert(order == Order::kRelaxed || order == Order::kRelease, "releases or is relaxed");
    (void)__atomic_fetch_add(address, value, builtin_order(order));
}

template <Order order, Scope scope>
KCCL_DEVICE void fence() {
    static_assert(order != Order::kRelaxed, "a fence orders something");
    __atomic_thread_fence(builtin_order(order));
}

// A packet acquires and releases here. On CPUs, calls that pull share channels with calls by
// packets, and a peer's reads of the staging must come before the staging is overwritten. On x86
// every load and store orders like that anyway.
template <Scope scope>
KCCL_DEVICE Packet load_packet(const Packet* address) {
    return {{load<Order::kRelaxed, scope>(&address->half[0]),
             load<Order::kAcquire, scope>(&address->half[1])}};
}

template <Scope scope>
KCCL_DEVICE void store_packet(Packet* address, Packet packet) {
    store<Order::kRelaxed, scope>(&address->half[0], packet.half[0]);
    store<Order::kRelease, scope>(&address->half[1], packet.half[1]);
}

// Makes mem.cuh include mem_copies.cuh.
#define KCCL_MEM_COPIES_THROUGH_REGISTERS 1

KCCL_DEVICE uint32_t add_shared(uint32_t* word, uint32_t value) {
    return __atomic_add_fetch(word, value, __ATOMIC_ACQ_REL);
}

// For cuda_words.h. A false assertion ends the process, as in any program on a CPU.
KCCL_DEVICE uint32_t add_and_fetch(uint32_t* word, uint32_t value) {
    return __atomic_add_fetch(word, value, __ATOMIC_RELAXED);
}
KCCL_DEVICE void fail_assertion(const char* text) {
    __builtin_printf("assertion failed in a kernel on the host: %s\n", text);
    __builtin_abort();
}

KCCL_DEVICE uint32_t load_shared(const uint32_t* word) {
    return load<Order::kAcquire, Scope::kBlock>(word);
}

KCCL_DEVICE void store_shared(uint32_t* word, uint32_t value) {
    store<Order::kRelease, Scope::kBlock>(word, value);
}

KCCL_DEVICE uint64_t clock_ns() { return kccl_host_clock_ns(); }
template <uint32_t NUM>
KCCL_DEVICE void take_registers() {}
template <uint32_t NUM>
KCCL_DEVICE void give_registers() {}

constexpr bool kMeetsInHardware = false;
KCCL_DEVICE bool meet_any(uint32_t, bool mine) { return mine; }

KCCL_DEVICE uint64_t clock_ticks() { return clock_ns(); }

KCCL_DEVICE uint32_t unit_id() { return platform::block_in_grid(); }
KCCL_DEVICE uint32_t die_id() { return 0; }

KCCL_DEVICE void poll_pause() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("isb");
#endif
}

KCCL_DEVICE int read_peer(uint64_t idle_context, int peer, void* to, uint64_t from,
                          uint64_t num_bytes) {
    return kccl_host_read_peer(idle_context, peer, to, from, num_bytes);
}

KCCL_DEVICE bool may_read_peer(uint64_t idle_context, int peer) {
    return kccl_host_may_read_peer(idle_context, peer) != 0;
}

KCCL_DEVICE void send_message(uint64_t idle_context, const void* in, uint64_t num_bytes, int peer,
                              int tag) {
    kccl_host_send(idle_context, in, num_bytes, peer, tag);
}
KCCL_DEVICE void receive_message(uint64_t idle_context, void* out, uint64_t num_bytes, int peer,
                                 int tag) {
    kccl_host_receive(idle_context, out, num_bytes, peer, tag);
}

KCCL_DEVICE uint32_t idle(uint64_t idle_context, uint64_t waited_ns, uint32_t missing,
                          uint32_t* gone) {
    return kccl_host_idle(idle_context, waited_ns, missing, gone);
}

KCCL_DEVICE void tell_host(uint64_t, uint32_t, const KcclRecord&) {}

}  // namespace kccl::mem
