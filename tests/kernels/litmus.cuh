// The kernels of tests/sim/litmus.py. `litmus` runs tests that are data: a few accesses by one
// thread of each of a few warps. Orders and scopes are data too, so it calls the engine as
// mem_sim.cuh does. The other kernels are for what such data cannot express.
#include <kccl/kccl.cuh>

namespace kccl {

// ---- Tests as data ------------------------------------------------------------------------------

enum What : uint8_t {
    kLoad,
    kStore,
    kPlainLoad,
    kPlainStore,
    kLoadPacket,
    kStorePacket,
    kAwait,
    kAwaitPacket,
    kClaim,
    kAdd,
    kFence,
    kFencePackets,
    kSync,
    kBareBarrier
};

struct Step {
    uint8_t what;
    uint8_t order;
    uint8_t scope;
    uint8_t word;    // which 4 bytes of the memory
    uint32_t value;  // packets: bytes that cannot tear
};

struct Role {
    uint8_t rank;
    uint8_t block;
    uint8_t warp;
    uint8_t num_steps;
    Step steps[12];
};

constexpr uint32_t kNumRoles = 4;
constexpr uint32_t kNumResults = 16;  // of each role

struct Test {
    Role roles[kNumRoles];
};

KCCL_DEVICE bool is_there(mem::Packet packet) { return packet.half[0] != 0 && packet.half[1] != 0; }

// The first thread of the role's warp acts. The others only take part in barriers.
KCCL_DEVICE void act(const Role& role, uint64_t memory, uint32_t* result) {
    for (uint32_t i = 0; i < role.num_steps; ++i) {
        const Step& step = role.steps[i];
        if (step.what == kSync) platform::sync_block();
        if (step.what == kBareBarrier) kccl_sim_engine->meet_block(0);
        if (!leads(warp())) continue;
        uint32_t* word = reinterpret_cast<uint32_t*>(memory) + step.word;
        auto* packet = reinterpret_cast<mem::Packet*>(word);
        const auto load = [&] {
            return static_cast<uint32_t>(kccl_sim_engine->load(word, 4, step.order, step.scope));
        };
        constexpr auto kSystem = static_cast<uint32_t>(mem::Scope::kSystem);
        switch (step.what) {
            case kLoad: *result++ = load(); break;
            case kStore: kccl_sim_engine->store(word, step.value, 4, step.order, step.scope); break;
            case kPlainLoad: *result++ = *word; break;
            case kPlainStore: *word = step.value; break;
            case kLoadPacket: {
                uint64_t halves[2];
                kccl_sim_engine->load_packet(packet, halves, step.value, kSystem);
                for (const uint64_t half : halves) {
                    *result++ = static_cast<uint32_t>(half);
                    *result++ = static_cast<uint32_t>(half >> 32);
                }
                break;
            }
            case kStorePacket: {
                const uint64_t halves[2] = {0x100000001, 0x100000001};
                kccl_sim_engine->store_packet(packet, halves, step.value, kSystem);
                break;
            }
            case kAwait:
                while (load() == 0) mem::poll_pause();
                break;
            case kAwaitPacket:
                while (!is_there(mem::load_packet(packet))) mem::poll_pause();
                break;
            case kClaim: *result++ = mem::claim(word, step.value) ? 1 : 0; break;
            case kAdd: (void)kccl_sim_engine->add(word, step.value, step.order, step.scope); break;
            case kFence: kccl_sim_engine->fence(step.order, step.scope); break;
            case kFencePackets: mem::fence_packets(); break;
            default: break;
        }
    }
}

KCCL_KERNEL void litmus(uint64_t memory, uint32_t* results, uint32_t rank, Test test) {
    const uint32_t warp_in_block = platform::thread_in_block() / platform::kWarpSize;
    for (uint32_t r = 0; r < kNumRoles; ++r) {
        const Role& role = test.roles[r];
        if (role.rank != rank || role.block != platform::block_in_grid()) continue;
        if (role.warp == warp_in_block) act(role, memory, results + r * kNumResults);
    }
}

// ---- Inside a warp ------------------------------------------------------------------------------

enum class Together { kSync, kVote, kShuffle };

// One thread writes, the warp synchronises, all threads read.
template <Together how>
KCCL_KERNEL void lanes(uint32_t* results) {
    KCCL_BLOCK_SHARED(uint32_t, word);
    if (leads(warp())) word = 1;
    if (how == Together::kSync) platform::sync_warp();
    if (how == Together::kVote) (void)platform::warp_ballot(true);
    if (how == Together::kShuffle) (void)platform::shuffle(1u, 0);
    results[warp().index()] = word;
}

// Rank 0 sends a packet to each thread of rank 1's warp, and a second one when it has the warp's
// credit. The warp gives the credit at once, or when it has synchronised.
template <bool meets>
KCCL_KERNEL void credit(uint64_t memory, uint32_t rank) {
    using mem::Order;
    using mem::Scope;
    const Warp warp;
    auto* packet = reinterpret_cast<mem::Packet*>(memory) + warp.index();
    auto* flag = reinterpret_cast<uint32_t*>(memory + 2048);
    if (rank == 0) {
        mem::store_packet(packet, {{1, 1}});
        while (platform::warp_any(mem::load<Order::kRelaxed, Scope::kSystem>(flag) == 0)) {
            mem::poll_pause();
        }
        mem::store_packet(packet, {{2, 2}});
        return;
    }
    while (platform::warp_any(!is_there(mem::load_packet(packet)))) mem::poll_pause();
    if (meets) warp.sync();
    if (leads(warp)) mem::store<Order::kRelaxed, Scope::kSystem>(flag, 1u);
}

// ---- Asynchronous copies ------------------------------------------------------------------------

enum class Copying {
    kRight,
    kReadsEarly,      // does not wait for the copy
    kWaitsForOther,   // waits for the copy that was started later
    kNoFirstFence,    // no fence_copies() behind init_copies()
    kNoFence,         // an ordinary write before the copy, and no fence_copies()
    kWriterFences,    // another thread writes and fences, then the block syncs
    kIssuerFences,    // another thread writes, the block syncs, then the issuer fences
    kWritesSource,    // while the copy may still read it
    kCopiesOver,      // while other threads may still read what the copy before brought
    kCopiesOverFree,  // the same when they have let go of it
    kNotDrained,      // ends while a copy is under way
};

constexpr uint32_t kCopyWords = 64;

struct CopySpace {
    alignas(128) uint32_t stage[2][kCopyWords];
    mem::CopyBarrier full[3];
    mem::CopyBarrier empty;
};

KCCL_DEVICE void await_copy(const mem::CopyBarrier* barrier, uint32_t parity) {
    while (platform::warp_any(!mem::has_completed(barrier, parity))) mem::poll_pause();
}

// Two copies on two barriers. A block of two warps: the first copies, both read. results[0]:
// whether the second copy was there before the first.
template <Copying how>
KCCL_KERNEL void copies(uint32_t* source, uint32_t* results) {
    KCCL_BLOCK_SHARED(CopySpace, space);
    const Block block;
    const Warp warp;
    constexpr uint32_t kBytes = kCopyWords * 4;
    const bool copies_here = block.index() < warp.size();
    constexpr bool kWrites =
        how == Copying::kNoFence || how == Copying::kWriterFences || how == Copying::kIssuerFences;
    if (leads(block)) {
        for (mem::CopyBarrier& full : space.full) mem::init_copies(&full, 1);
        mem::init_copies(&space.empty, 1);
        if (how != Copying::kNoFirstFence) mem::fence_copies();
    }
    block.sync();
    if (kWrites && block.index() == warp.size()) {
        source[1] = 7;
        if (how == Copying::kWriterFences) mem::fence_copies();
    }
    block.sync();
    if (copies_here) {
        if (how == Copying::kIssuerFences) mem::fence_copies();
        for (uint32_t i = 0; i < 2; ++i) {
            if (leads(warp)) mem::arrive_expecting(&space.full[i], kBytes);
            mem::copy_async(space.stage[i], source + i * kCopyWords, kBytes, &space.full[i],
                            warp.index(), warp.size());
        }
        if (how == Copying::kWritesSource && leads(warp)) source[1] = 7;
    }
    if (leads(block)) {
        bool has_second = false;
        bool has_first = false;
        while (!has_first && !has_second) {
            has_second = mem::has_completed(&space.full[1], 0);
            has_first = mem::has_completed(&space.full[0], 0);
            if (!has_first && !has_second) mem::poll_pause();
        }
        results[0] = has_first ? 0 : 1;
    }
    if (how == Copying::kWaitsForOther) await_copy(&space.full[1], 0);
    if (how != Copying::kWaitsForOther && how != Copying::kReadsEarly) {
        await_copy(&space.full[0], 0);
    }
    results[1 + block.index()] = space.stage[0][block.index() % kCopyWords];
    constexpr bool kAgain = how == Copying::kCopiesOver || how == Copying::kCopiesOverFree;
    if (kAgain && !copies_here) {
        warp.sync();
        if (leads(warp)) mem::arrive(&space.empty);
    }
    if (kAgain && copies_here) {
        warp.sync();
        if (how == Copying::kCopiesOverFree) await_copy(&space.empty, 0);
        if (leads(warp)) mem::arrive_expecting(&space.full[2], kBytes);
        mem::copy_async(space.stage[0], source, kBytes, &space.full[2], warp.index(), warp.size());
        await_copy(&space.full[2], 0);
    }
    await_copy(&space.full[1], 0);
    if (how == Copying::kNotDrained) {
        block.sync();
        if (leads(warp) && copies_here) mem::arrive_expecting(&space.full[2], kBytes);
        if (copies_here) {
            mem::copy_async(space.stage[0], source, kBytes, &space.full[2], warp.index(),
                            warp.size());
        }
    }
}

// The ring of ring.cuh. With `pops_early` the consumer lets go of a stage before it reads it.
template <bool pops_early>
KCCL_KERNEL void ring(DeviceComm comm, const uint32_t* source, uint32_t* results) {
    using SmallRing = Ring<2, 64>;
    constexpr uint32_t kCopies = 5;
    constexpr uint32_t kWords = SmallRing::kStageBytes / 4;
    KCCL_BLOCK_SHARED(SmallRing, stages);
    init_ring(block(), stages, 1);
    if (block().index() < warp().size()) {
        Producer<SmallRing> producer(stages, comm);
        for (uint32_t n = 0; n < kCopies; ++n) {
            (void)producer.push(source + n * kWords, SmallRing::kStageBytes, 2);
        }
        producer.drain();
        return;
    }
    Consumer<SmallRing> consumer(stages, comm);
    for (uint32_t n = 0; n < kCopies; ++n) {
        const auto* words = reinterpret_cast<const uint32_t*>(consumer.front());
        if (pops_early) consumer.pop();
        results[warp().index()] += words[warp().index() % kWords];
        if (!pops_early) consumer.pop();
    }
}

}  // namespace kccl
