// mem.cuh's asynchronous copies for hardware that has none: a warp copies through its registers,
// and returns when it is done. The target provides add_shared (acquire-release, returns the sum),
// load_shared (acquires) and store_shared (releases), all with block scope. The simulator has both
// kinds of copies, and the simulated machine's model chooses.
#pragma once

namespace kccl::mem {

#if defined(KCCL_TARGET_SIM)
namespace through_registers {
#endif

// word[0]: what the running phase still waits for, arrivals * kArrival + bytes.
// word[1]: arrivals of a phase * 2 + parity of the running phase.
constexpr uint32_t kArrival = 1u << 20;

KCCL_DEVICE void init_copies(CopyBarrier* barrier, uint32_t arrivals) {
    barrier->word[0] = arrivals * kArrival;
    barrier->word[1] = arrivals * 2;
}

// Subtracts `part` from what the phase waits for. The thread that makes it zero begins the next
// phase; nobody else touches the barrier until word[1] says so.
KCCL_DEVICE void settle(CopyBarrier* barrier, uint32_t part) {
    if (add_shared(&barrier->word[0], 0u - part) != 0) return;
    const uint32_t phase = load_shared(&barrier->word[1]);
    store_shared(&barrier->word[0], (phase >> 1) * kArrival);
    store_shared(&barrier->word[1], phase ^ 1u);
}

KCCL_DEVICE void arrive(CopyBarrier* barrier) { settle(barrier, kArrival); }

KCCL_DEVICE void arrive_expecting(CopyBarrier* barrier, uint32_t num_bytes) {
    settle(barrier, kArrival - num_bytes);
}

KCCL_DEVICE bool has_completed(const CopyBarrier* barrier, uint32_t parity) {
    return (load_shared(&barrier->word[1]) & 1u) != parity;
}

KCCL_DEVICE void copy_async(void* to, const void* from, uint32_t num_bytes, CopyBarrier* barrier,
                            uint32_t index, uint32_t size) {
    // The number of lines that a thread loads before it stores any.
    constexpr uint32_t kLines = 8;
    auto* out = static_cast<Line*>(to);
    auto* in = static_cast<const Line*>(from);
    const uint32_t num_lines = num_bytes / sizeof(Line);
    for (uint32_t i = index; i < num_lines; i += kLines * size) {
        Line lines[kLines];
        for (uint32_t k = 0; k < kLines; ++k) {
            if (i + k * size < num_lines) lines[k] = load_streamed(in + i + k * size);
        }
        for (uint32_t k = 0; k < kLines; ++k) {
            if (i + k * size < num_lines) store_plain(out + i + k * size, lines[k]);
        }
    }
    platform::sync_warp();
    if (index == 0) settle(barrier, num_bytes);
}

// Copies are ordinary stores here, so they need no fence of their own.
KCCL_DEVICE void fence_copies() {}

#if defined(KCCL_TARGET_SIM)
}  // namespace through_registers

KCCL_DEVICE bool copies_late() { return kccl_sim_engine->copies_late() != 0; }

KCCL_DEVICE void init_copies(CopyBarrier* barrier, uint32_t arrivals) {
    if (!copies_late()) return through_registers::init_copies(barrier, arrivals);
    kccl_sim_engine->barrier_init(barrier, arrivals);
}

KCCL_DEVICE void arrive(CopyBarrier* barrier) {
    if (!copies_late()) return through_registers::arrive(barrier);
    kccl_sim_engine->barrier_arrive(barrier, 0);
}

KCCL_DEVICE void arrive_expecting(CopyBarrier* barrier, uint32_t num_bytes) {
    if (!copies_late()) return through_registers::arrive_expecting(barrier, num_bytes);
    kccl_sim_engine->barrier_arrive(barrier, num_bytes);
}

KCCL_DEVICE bool has_completed(const CopyBarrier* barrier, uint32_t parity) {
    if (!copies_late()) return through_registers::has_completed(barrier, parity);
    return kccl_sim_engine->barrier_has_completed(barrier, parity) != 0;
}

KCCL_DEVICE void copy_async(void* to, const void* from, uint32_t num_bytes, CopyBarrier* barrier,
                            uint32_t index, uint32_t size) {
    if (!copies_late()) {
        return through_registers::copy_async(to, from, num_bytes, barrier, index, size);
    }
    if (index == 0) kccl_sim_engine->copy_async(to, from, num_bytes, barrier);
}

KCCL_DEVICE void fence_copies() {
    if (copies_late()) kccl_sim_engine->fence_copies();
}
#endif

KCCL_DEVICE bool has_completed_now(const CopyBarrier* barrier, uint32_t parity) {
    return has_completed(barrier, parity);
}

}  // namespace kccl::mem
