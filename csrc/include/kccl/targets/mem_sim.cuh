// mem.cuh in the simulator: every access goes to the engine, which decides what a load sees. Plain
// accesses are seen too: -fsanitize=thread makes the compiler announce them (csrc/sim/module.inc).
#pragma once

#include "mem_cpu.cuh"
#include "sim_device.h"

namespace kccl::mem {

// Each half of a packet is single-copy atomic on every GPU. The whole packet is not on all GPUs.
constexpr uint32_t kPacketUnitBytes = 8;

template <Order order, Scope scope, class T>
KCCL_DEVICE T load(const T* address) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "32 or 64 bits");
    static_assert(order == Order::kRelaxed || order == Order::kAcquire, "acquires or is relaxed");
    return static_cast<T>(kccl_sim_engine->load(address, sizeof(T), static_cast<uint32_t>(order),
                                                static_cast<uint32_t>(scope)));
}

template <Order order, Scope scope, class T>
KCCL_DEVICE void store(T* address, T value) {
    static_assert(sizeof(T) == 4 || sizeof(T) == 8, "32 or 64 bits");
    static_assert(order == Order::kRelaxed || order == Order::kRelease, "releases or is relaxed");
    kccl_sim_engine->store(address, static_cast<uint64_t>(value), sizeof(T),
                           static_cast<uint32_t>(order), static_cast<uint32_t>(scope));
}

template <Scope scope>
KCCL_DEVICE Packet load_packet(const Packet* address) {
    Packet packet;
    kccl_sim_engine->load_packet(address, packet.half, kPacketUnitBytes,
                                 static_cast<uint32_t>(scope));
    return packet;
}

template <Scope scope>
KCCL_DEVICE void store_packet(Packet* address, Packet packet) {
    kccl_sim_engine->store_packet(address, packet.half, kPacketUnitBytes,
                                  static_cast<uint32_t>(scope));
}

KCCL_DEVICE bool claim(uint32_t* address, uint32_t value) {
    return kccl_sim_engine->claim(address, value) != 0;
}

template <Order order, Scope scope>
KCCL_DEVICE void add(uint32_t* address, uint32_t value) {
    static_assert(order == Order::kRelaxed || order == Order::kRelease, "releases or is relaxed");
    kccl_sim_engine->add(address, value, static_cast<uint32_t>(order),
                         static_cast<uint32_t>(scope));
}

template <Order order, Scope scope>
KCCL_DEVICE void fence() {
    static_assert(order != Order::kRelaxed, "a fence orders something");
    kccl_sim_engine->fence(static_cast<uint32_t>(order), static_cast<uint32_t>(scope));
}

KCCL_DEVICE void fence_packets() { kccl_sim_engine->fence_packets(); }

// Makes mem.cuh include mem_copies.cuh, for simulated machines without asynchronous copies.
#define KCCL_MEM_COPIES_THROUGH_REGISTERS 1

KCCL_DEVICE uint32_t add_shared(uint32_t* word, uint32_t value) {
    return kccl_sim_engine->add(word, value, static_cast<uint32_t>(Order::kAcqRel),
                                static_cast<uint32_t>(Scope::kBlock));
}

// For cuda_words.h: adds at device scope, relaxed, and returns the sum.
KCCL_DEVICE uint32_t add_and_fetch(uint32_t* word, uint32_t value) {
    return kccl_sim_engine->add(word, value, static_cast<uint32_t>(Order::kRelaxed),
                                static_cast<uint32_t>(Scope::kDevice));
}

KCCL_DEVICE void fail_assertion(const char* text) {
    kccl_sim_engine->stop_assertion(text, nullptr);
}

KCCL_DEVICE uint32_t load_shared(const uint32_t* word) {
    return load<Order::kAcquire, Scope::kBlock>(word);
}

KCCL_DEVICE void store_shared(uint32_t* word, uint32_t value) {
    store<Order::kRelease, Scope::kBlock>(word, value);
}

KCCL_DEVICE void await_kernels_before() { kccl_sim_engine->await_kernels_before(); }
KCCL_DEVICE void launch_dependents() { kccl_sim_engine->launch_dependents(); }

KCCL_DEVICE uint64_t clock_ns() { return kccl_sim_engine->clock_ns(); }
template <uint32_t NUM>
KCCL_DEVICE void take_registers() {}
template <uint32_t NUM>
KCCL_DEVICE void give_registers() {}

constexpr bool kMeetsInHardware = false;
KCCL_DEVICE bool meet_any(uint32_t, bool mine) { return mine; }

KCCL_DEVICE uint64_t clock_ticks() { return clock_ns(); }

KCCL_DEVICE uint32_t unit_id() { return platform::block_in_grid(); }
KCCL_DEVICE uint32_t die_id() { return 0; }

KCCL_DEVICE void poll_pause() { kccl_sim_engine->poll_pause(); }

KCCL_DEVICE int read_peer(uint64_t, int, void*, uint64_t, uint64_t) { return -1; }
KCCL_DEVICE bool may_read_peer(uint64_t, int) { return false; }
KCCL_DEVICE void send_message(uint64_t, const void*, uint64_t, int, int) {}
KCCL_DEVICE void receive_message(uint64_t, void*, uint64_t, int, int) {}

KCCL_DEVICE uint32_t idle(uint64_t idle_context, uint64_t, uint32_t missing, uint32_t* gone) {
    return kccl_sim_engine->idle(idle_context, missing, gone);
}

KCCL_DEVICE void tell_host(uint64_t context, uint32_t status, const KcclRecord& record) {
    kccl_sim_engine->tell_host(context, status, &record);
}

}  // namespace kccl::mem
