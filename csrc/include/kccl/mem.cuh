// Every load, store and copy of memory that another thread can see, by order and scope; and the few
// other instructions that C++ cannot express. The targets' instructions are in
// targets/mem_cuda.cuh, mem_hip.cuh, mem_host.cuh and mem_sim.cuh, the only files with inline
// assembly.
//
// Order says what else becomes visible with this access. Scope says to whom: the block, the device,
// or the system (peers and the CPU).
//
//   load<Order, Scope>(p)       store<Order, Scope>(p, v)      32 and 64 bits, naturally aligned
//   load_packet<Scope>(p)       two 64-bit halves, each single-copy atomic; relaxed; of device or
//   store_packet<Scope>(p, v)   system scope, by default of system scope
//   claim(p, v)                 changes 0 to v; true in the one thread that changed it; relaxed
//   add<Order, Scope>(p, v)     adds to a 32-bit word; relaxed or release. A load that acquires the
//                               sum acquires from all threads that added
//   fence<Order, Scope>         between relaxed accesses of this thread. kRelease: stores behind it
//                               release. kAcquire: loads before it acquire. kAcqRel does both;
//                               kSeqCst also orders such fences among each other. On GPUs a release
//                               waits until what was stored has arrived. An acquire does not wait
//   fence_packets()             a fence between packets of system scope only. Packets that this
//                               thread has stored or loaded come before packets that it stores or
//                               loads later. So do packets of other threads that a sync of the
//                               block or warp has ordered before. Nothing else is ordered
//   finish_stores()             called before a meeting (meeting.cuh) after which one thread fences
//                               for all: that fence then orders what this thread has stored too.
//                               Before a sync of the block it is not needed
//   load_plain / store_plain    no order: for memory that a signal already hands over
//   load_streamed               load_plain of up to 16 bytes of global memory that are read once
//   load_words / store_words    load_plain / store_plain of a struct of 16 bytes, as two words
//   read_peer                   a plain copy from another process's own memory; returns 0 or errno.
//                               CPUs only
//   may_read_peer               whether this process may now read the memory of a peer's process
//   overwrite                   a copy to cache lines that a peer has read and still caches
//   copy                        makes the share of thread `index` of `size` of a plain copy
//   copy_async                  a copy into block-shared memory that ends later: see CopyBarrier
//
// A thread that polls calls clock_ns, poll_pause and idle. idle() yields the core to other ranks,
// says which of the missing ranks are gone, and returns a KcclStatus: whether the user interrupted.
// After a poll that found what it waited for there is no poll_pause(). So the simulator can tell
// such a poll from those that came too early.
//
// In a kernel that the host launches, each thread calls await_kernels_before() first, because the
// kernel may be a programmatic dependent. It returns when the kernels before this one have ended
// and what they wrote is visible. After launch_dependents(), dependent kernels behind this one may
// come onto the device, when a thread of each of its blocks has called it or the block has ended.
// On targets without such launches neither does anything.
//
// meet_any(n, mine), where kMeetsInHardware: the block's first n threads, whole warps, wait for
// each other. Returns whether any of them passed true. See meeting.cuh.
//
// clock_ticks() takes a few cycles, where clock_ns() may take hundreds. It counts at the rate of
// its own multiprocessor, so only two reads on the same multiprocessor may be compared.
//
// unit_id() is the hardware's number of the multiprocessor or compute unit that runs this block,
// die_id() that of its die on AMD's GPUs, else 0. Numbers need not be dense. On a CPU each block
// counts as a unit.
//
// give_registers<NUM>(), take_registers<NUM>(): from here on the warp has NUM registers a thread, a
// multiple of 8 between 24 and 256, and gives the others back to the block, or waits for as many as
// others give. Each is called by all threads of four warps of which the first one's number in the
// block is a multiple of four. On sm_90a only; elsewhere nothing happens.
//
// prefetch(address) requests data that load_plain() will read soon.
//
// keep(value) returns the value in registers, for hot loops. On some targets the call is slow.
// forget(value) returns the value, but on GPUs the compiler does not know that it is the same one.
// So in a large loop the compiler computes again what depends on the value, instead of keeping that
// in registers from one turn to the next. forget_uniform(value) is forget() for a value that is the
// same in all threads of a warp, which AMD's GPUs have in a scalar register. forget_index(value) is
// forget() for the number of a thread or warp, in unrolled loops. It does so only on NVIDIA's GPUs,
// because clang would keep a register for each turn.
//
// tell_host(context, status, record) stores a failure where the host reads it without a copy from
// the device: on GPUs, in the KcclMailbox.
#pragma once

#include "abi.h"

namespace kccl::mem {

enum class Order { kRelaxed, kAcquire, kRelease, kAcqRel, kSeqCst };
enum class Scope { kBlock, kDevice, kSystem };

// 16 bytes that one instruction writes: see ll16.cuh and sentinel.cuh.
struct Packet {
    uint64_t half[2];
};

template <Scope scope = Scope::kSystem>
KCCL_DEVICE Packet load_packet(const Packet* address);
template <Scope scope = Scope::kSystem>
KCCL_DEVICE void store_packet(Packet* address, Packet packet);

// Counts, in block-shared memory, what a phase still waits for: arrivals of threads, and bytes of
// asynchronous copies. When both are zero the phase ends and the next one begins, as with NVIDIA's
// mbarrier.
//
//   init_copies(b, arrivals)     makes b ready for phases of so many arrivals, at most 2047. One
//                                thread calls it, then fence_copies(); then the block syncs
//   arrive(b)                    counts one arrival; releases to the block
//   arrive_expecting(b, n)       arrive(b), and the phase waits for n more bytes, less than 2^20
//   copy_async(to, from, n, b, index, size)
//                                copies n bytes from global to shared memory. When they have
//                                arrived, subtracts n from what b's phase waits for. Called by all
//                                `size` threads of a warp, which has called arrive_expecting() for
//                                these bytes or will. n and both addresses are multiples of 16.
//                                Nobody may access either memory before the phase ends
//   has_completed(b, parity)     whether the phase of this parity has ended; acquires. The first
//                                phase has parity 0; before it ends, parity 1 counts as ended. May
//                                take some microseconds to say no
//   has_completed_now(b, parity) the same answer, without that delay
//   fence_copies()               what this thread wrote before comes before copies started later
struct alignas(8) CopyBarrier {
    uint32_t word[2];
};

}  // namespace kccl::mem

#if defined(KCCL_TARGET_CUDA)
#include "targets/mem_cuda.cuh"
#elif defined(KCCL_TARGET_HIP)
#include "targets/mem_hip.cuh"
#elif defined(KCCL_TARGET_SIM)
#include "targets/mem_sim.cuh"
#else
#include "targets/mem_host.cuh"
#endif
#if defined(KCCL_TARGET_CUDA) || defined(KCCL_TARGET_HIP)
#include "targets/mem_mailbox.cuh"
#endif

// A function in which the simulator checks the alignment of each access. In all of the library's
// functions such checks would be a third of what it compiles. So they are in those that access
// plain memory by a type of any size. Behind kccl.cuh KCCL_DEVICE is checked: there it is the
// user's.
#if defined(KCCL_TARGET_SIM)
#define KCCL_DEVICE_CHECKED inline __attribute__((always_inline))
#else
#define KCCL_DEVICE_CHECKED KCCL_DEVICE
#endif

namespace kccl::mem {

// On CUDA this is `*address`, because NVRTC has no __builtin_memcpy, and memcpy forgets the
// alignment. In the simulator it is `*address` too, because compilers announce a typed access to
// the simulator, but not every memcpy.
template <class T>
KCCL_DEVICE_CHECKED T load_plain(const T* address) {
#if defined(KCCL_TARGET_CUDA) || defined(KCCL_TARGET_SIM)
    return *address;
#else
    T value;
    __builtin_memcpy(&value, address, sizeof(T));
    return value;
#endif
}

template <class T>
KCCL_DEVICE_CHECKED void store_plain(T* address, T value) {
#if defined(KCCL_TARGET_CUDA) || defined(KCCL_TARGET_SIM)
    *address = value;
#else
    __builtin_memcpy(address, &value, sizeof(T));
#endif
}

#if !defined(KCCL_TARGET_HIP)
KCCL_DEVICE void finish_stores() {}
#endif

#if !defined(KCCL_TARGET_HIP) && !defined(KCCL_TARGET_SIM)
KCCL_DEVICE void fence_packets() { fence<Order::kAcqRel, Scope::kSystem>(); }
#endif

#if !defined(KCCL_TARGET_HIP)
template <class T>
KCCL_DEVICE T load_streamed(const T* address) {
    return load_plain(address);
}
#endif

// Loads a struct of 16 bytes plainly, as two words. If it were loaded member by member, compilers
// would wait for each load separately.
template <class T>
KCCL_DEVICE T load_words(const T* address) {
    const auto* const words = reinterpret_cast<const uint64_t*>(address);
    const uint64_t both[2] = {load_plain(words), load_plain(words + 1)};
    static_assert(sizeof(T) == sizeof(both), "of two words");
    T value;
    platform::copy_bytes(&value, both, sizeof(T));
    return value;
}

template <class T>
KCCL_DEVICE void store_words(T* address, const T& value) {
    uint64_t both[2];
    static_assert(sizeof(T) == sizeof(both), "of two words");
    platform::copy_bytes(both, &value, sizeof(T));
    auto* const words = reinterpret_cast<uint64_t*>(address);
    store_plain(words, both[0]);
    store_plain(words + 1, both[1]);
}

// 16 bytes, which is the most that one thread moves with one instruction.
struct alignas(16) Line {
    uint64_t word[2];
};

KCCL_DEVICE_CHECKED void copy(void* to, const void* from, uint64_t num_bytes, uint32_t index,
                              uint32_t size) {
#if defined(KCCL_TARGET_HOST)
    (void)index;
    (void)size;
    // An empty array may have a null address, with which memcpy must not be called.
    if (num_bytes > 0) __builtin_memcpy(to, from, num_bytes);
#else
    auto* out = static_cast<uint8_t*>(to);
    auto* in = static_cast<const uint8_t*>(from);
    const bool aligned =
        ((reinterpret_cast<uint64_t>(out) | reinterpret_cast<uint64_t>(in)) & 15) == 0;
    const uint64_t num_lines = aligned ? num_bytes / sizeof(Line) : 0;
    auto* out_lines = reinterpret_cast<Line*>(out);
    auto* in_lines = reinterpret_cast<const Line*>(in);
    // The number of loads that a thread starts before it waits for any.
    constexpr uint32_t kAtOnce = 4;
    for (uint64_t line = index; line < num_lines; line += kAtOnce * uint64_t{size}) {
        Line lines[kAtOnce];
        KCCL_UNROLL
        for (uint32_t k = 0; k < kAtOnce; ++k) {
            if (line + k * uint64_t{size} >= num_lines) continue;
            // The struct is copied word by word, because on AMD's GPUs clang keeps an array of
            // whole structs in memory.
            const Line& from_here = in_lines[line + k * uint64_t{size}];
            lines[k] = Line{{from_here.word[0], from_here.word[1]}};
        }
        KCCL_UNROLL
        for (uint32_t k = 0; k < kAtOnce; ++k) {
            if (line + k * uint64_t{size} < num_lines)
                out_lines[line + k * uint64_t{size}] = lines[k];
        }
    }
    for (uint64_t i = num_lines * sizeof(Line) + index; i < num_bytes; i += size) out[i] = in[i];
#endif
}

// Copies as copy() does, to cache lines that a peer has read and still has in its cache. On a CPU
// each line is prefetched some time before it is stored to, because stores wait for their lines one
// after the other, and prefetches overlap.
KCCL_DEVICE void overwrite(void* to, const void* from, uint64_t num_bytes, uint32_t index,
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

#if defined(KCCL_MEM_COPIES_THROUGH_REGISTERS)
#include "targets/mem_copies.cuh"
#endif

#if defined(KCCL_TARGET_SIM) || defined(KCCL_HOST_GRID)
#include "targets/cuda_words.h"
#endif
