// mem.cuh on NVIDIA GPUs: PTX.
#pragma once

namespace kccl::mem {

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

template <Scope scope>
KCCL_DEVICE Packet load_packet(const Packet* address) {
    Packet packet;
    if constexpr (scope == Scope::kDevice) {
        asm volatile("ld.relaxed.gpu.global.v2.b64 {%0, %1}, [%2];"
                     : "=l"(packet.half[0]), "=l"(packet.half[1])
                     : "l"(address)
                     : "memory");
    } else {
        asm volatile("ld.relaxed.sys.global.v2.b64 {%0, %1}, [%2];"
                     : "=l"(packet.half[0]), "=l"(packet.half[1])
                     : "l"(address)
                     : "memory");
    }
    return packet;
}

template <Scope scope>
KCCL_DEVICE void store_packet(Packet* address, Packet packet) {
    if constexpr (scope == Scope::kDevice) {
        asm volatile("st.relaxed.gpu.global.v2.b64 [%0], {%1, %2};" ::"l"(address),
                     "l"(packet.half[0]), "l"(packet.half[1])
                     : "memory");
    } else {
        asm volatile("st.relaxed.sys.global.v2.b64 [%0], {%1, %2};" ::"l"(address),
                     "l"(packet.half[0]), "l"(packet.half[1])
                     : "memory");
    }
}

KCCL_DEVICE bool claim(uint32_t* address, uint32_t value) {
    uint32_t seen;
    asm volatile("atom.relaxed.gpu.global.cas.b32 %0, [%1], 0, %2;"
                 : "=r"(seen)
                 : "l"(address), "r"(value)
                 : "memory");
    return seen == 0;
}

#define KCCL_MEM_ADD(order, scope)                                                             \
    asm volatile("red." order "." scope ".global.add.u32 [%0], %1;" ::"l"(address), "r"(value) \
                 : "memory")

template <Order order, Scope scope>
KCCL_DEVICE void add(uint32_t* address, uint32_t value) {
    static_assert(order == Order::kRelaxed || order == Order::kRelease, "releases or is relaxed");
    static_assert(scope == Scope::kDevice, "a counter is one device's");
    if constexpr (order == Order::kRelease)
        KCCL_MEM_ADD("release", "gpu");
    else
        KCCL_MEM_ADD("relaxed", "gpu");
}

#undef KCCL_MEM_ADD

#define KCCL_MEM_FENCE(order)                                  \
    do {                                                       \
        if constexpr (scope == Scope::kBlock)                  \
            asm volatile("fence." order ".cta;" ::: "memory"); \
        else if constexpr (scope == Scope::kDevice)            \
            asm volatile("fence." order ".gpu;" ::: "memory"); \
        else                                                   \
            asm volatile("fence." order ".sys;" ::: "memory"); \
    } while (0)
// PTX has fence.acquire and fence.release from version 8.6 on, which came with CUDA 12.7. Before
// that, fence.acq_rel is used for both.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900 && \
    __CUDACC_VER_MAJOR__ * 100 + __CUDACC_VER_MINOR__ >= 1207
#define KCCL_MEM_ONE_WAY_FENCE(order) KCCL_MEM_FENCE(order)
#else
#define KCCL_MEM_ONE_WAY_FENCE(order) KCCL_MEM_FENCE("acq_rel")
#endif

template <Order order, Scope scope>
KCCL_DEVICE void fence() {
    static_assert(order != Order::kRelaxed, "a fence orders something");
    if constexpr (order == Order::kSeqCst)
        KCCL_MEM_FENCE("sc");
    else if constexpr (order == Order::kAcqRel)
        KCCL_MEM_FENCE("acq_rel");
    else if constexpr (order == Order::kAcquire)
        KCCL_MEM_ONE_WAY_FENCE("acquire");
    else
        KCCL_MEM_ONE_WAY_FENCE("release");
}

#undef KCCL_MEM_FENCE
#undef KCCL_MEM_ONE_WAY_FENCE

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
KCCL_DEVICE void await_kernels_before() { asm volatile("griddepcontrol.wait;" ::: "memory"); }
KCCL_DEVICE void launch_dependents() { asm volatile("griddepcontrol.launch_dependents;"); }
#else
KCCL_DEVICE void await_kernels_before() {}
KCCL_DEVICE void launch_dependents() {}
#endif

KCCL_DEVICE void prefetch(const void* address) {
    asm volatile("prefetch.global.L1 [%0];" ::"l"(address));
}

// Returns the value, in registers from here on. ptxas reads kernel parameters and special registers
// again at each use, in hot loops too, but not values loaded from memory. So keep() sends the value
// through memory.
template <class T>
KCCL_DEVICE T keep(T value) {
    static_assert(sizeof(T) % 4 == 0, "whole registers");
    uint32_t words[sizeof(T) / 4];
    memcpy(words, &value, sizeof(T));
    for (uint32_t& word : words) {
        asm volatile(
            "{ .local .u32 memory; .reg .u64 memory_address; mov.u64 memory_address, memory; "
            "cvta.local.u64 memory_address, memory_address; "
            "st.volatile.u32 [memory_address], %0; ld.volatile.u32 %0, [memory_address]; }"
            : "+r"(word));
    }
    memcpy(&value, words, sizeof(T));
    return value;
}

// Returns the value, but hides from the compiler where it came from: see mem.cuh.
KCCL_DEVICE uint32_t forget(uint32_t value) {
    asm volatile("" : "+r"(value));
    return value;
}
KCCL_DEVICE uint32_t forget_uniform(uint32_t value) { return forget(value); }
KCCL_DEVICE uint32_t forget_index(uint32_t value) { return forget(value); }

KCCL_DEVICE uint32_t shared_address(const void* address) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(address));
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900

KCCL_DEVICE void init_copies(CopyBarrier* barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)),
                 "r"(arrivals)
                 : "memory");
}

KCCL_DEVICE void arrive(CopyBarrier* barrier) {
    asm volatile(
        "mbarrier.arrive.release.cta.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier))
        : "memory");
}

KCCL_DEVICE void arrive_expecting(CopyBarrier* barrier, uint32_t num_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [%0], %1;" ::"r"(
                     shared_address(barrier)),
                 "r"(num_bytes)
                 : "memory");
}

#define KCCL_MEM_HAS_COMPLETED(wait)                                                              \
    asm volatile("{ .reg .pred done; mbarrier." wait                                              \
                 ".parity.acquire.cta.shared::cta.b64 done, [%1], %2; selp.u32 %0, 1, 0, done; }" \
                 : "=r"(completed)                                                                \
                 : "r"(shared_address(barrier)), "r"(parity)                                      \
                 : "memory")

// The hardware may suspend the thread for a short time before it answers no.
KCCL_DEVICE bool has_completed(const CopyBarrier* barrier, uint32_t parity) {
    uint32_t completed;
    KCCL_MEM_HAS_COMPLETED("try_wait");
    return completed != 0;
}

KCCL_DEVICE bool has_completed_now(const CopyBarrier* barrier, uint32_t parity) {
    uint32_t completed;
    KCCL_MEM_HAS_COMPLETED("test_wait");
    return completed != 0;
}

#undef KCCL_MEM_HAS_COMPLETED

KCCL_DEVICE void copy_async(void* to, const void* from, uint32_t num_bytes, CopyBarrier* barrier,
                            uint32_t index, uint32_t) {
    if (index != 0) return;
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, "
        "[%3];" ::"r"(shared_address(to)),
        "l"(from), "r"(num_bytes), "r"(shared_address(barrier))
        : "memory");
}

// Asynchronous copies go through the async proxy. Without this fence they are not ordered behind
// what the thread did before by ordinary loads and stores.
KCCL_DEVICE void fence_copies() { asm volatile("fence.proxy.async;" ::: "memory"); }

#else

// Makes mem.cuh include mem_copies.cuh.
#define KCCL_MEM_COPIES_THROUGH_REGISTERS 1

KCCL_DEVICE uint32_t add_shared(uint32_t* word, uint32_t value) {
    uint32_t before;
    asm volatile("atom.acq_rel.cta.shared.add.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "r"(shared_address(word)), "r"(value)
                 : "memory");
    return before + value;
}

KCCL_DEVICE uint32_t load_shared(const uint32_t* word) {
    uint32_t value;
    asm volatile("ld.acquire.cta.shared.u32 %0, [%1];"
                 : "=r"(value)
                 : "r"(shared_address(word))
                 : "memory");
    return value;
}

KCCL_DEVICE void store_shared(uint32_t* word, uint32_t value) {
    asm volatile("st.release.cta.shared.u32 [%0], %1;" ::"r"(shared_address(word)), "r"(value)
                 : "memory");
}

#endif

// Returns a * b, rounded by itself: never fused with a sum.
KCCL_DEVICE float product(float a, float b) { return __fmul_rn(a, b); }
KCCL_DEVICE double product(double a, double b) { return __dmul_rn(a, b); }

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

// Rounds to nearest even; `value` is not NaN.
KCCL_DEVICE uint16_t bfloat16_from_float(float value) {
    uint16_t bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

// Converts two values; the first one goes into the lower half. A NaN becomes some NaN. The macro
// tells columns.cuh so: there other targets need a path that checks for NaN.
#define KCCL_MEM_KEEPS_NAN 1
KCCL_DEVICE uint32_t halves_from_floats(float first, float second) {
    uint32_t bits;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
    return bits;
}

KCCL_DEVICE uint32_t bfloat16s_from_floats(float first, float second) {
    uint32_t bits;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(bits) : "f"(second), "f"(first));
    return bits;
}

// Makes float8.cuh use e4m3s_from_floats().
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
#define KCCL_MEM_CONVERTS_E4M3 1

// Rounds two values to e4m3, limited to 448 either way; the first one goes into the lower byte.
KCCL_DEVICE uint32_t e4m3s_from_floats(float first, float second) {
    uint16_t bits;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(bits) : "f"(second), "f"(first));
    return bits;
}
#endif

KCCL_DEVICE uint64_t clock_ns() {
    uint64_t now;
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
    return now;
}

template <uint32_t NUM>
KCCL_DEVICE void take_registers() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(NUM));
#endif
}
template <uint32_t NUM>
KCCL_DEVICE void give_registers() {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(NUM));
#endif
}

constexpr bool kMeetsInHardware = true;
KCCL_DEVICE bool meet_any(uint32_t num_threads, bool mine) {
    uint32_t any;
    asm volatile(
        "{ .reg .pred mine, any; setp.ne.u32 mine, %2, 0; barrier.cta.red.or.pred any, 1, %1, "
        "mine; "
        "selp.u32 %0, 1, 0, any; }"
        : "=r"(any)
        : "r"(num_threads), "r"(mine ? 1u : 0u)
        : "memory");
    return any != 0;
}

KCCL_DEVICE uint64_t clock_ticks() { return static_cast<uint64_t>(clock64()); }

KCCL_DEVICE uint32_t unit_id() {
    uint32_t id;
    asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
    return id;
}
KCCL_DEVICE uint32_t die_id() { return 0; }

KCCL_DEVICE void poll_pause() {}

KCCL_DEVICE int read_peer(uint64_t, int, void*, uint64_t, uint64_t) { return -1; }
KCCL_DEVICE bool may_read_peer(uint64_t, int) { return false; }
KCCL_DEVICE void send_message(uint64_t, const void*, uint64_t, int, int) {}
KCCL_DEVICE void receive_message(uint64_t, void*, uint64_t, int, int) {}

}  // namespace kccl::mem
