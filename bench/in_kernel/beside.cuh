// Calls between the blocks of a GPU while another kernel reads memory as fast as it can
// (beside.py). The stream is a kernel of its own: the warps of a block on each multiprocessor copy
// memory into block-shared memory, as the engine's producers do. Counted is grid_sync with other
// numbers of counters and polls, and Flagged with flags instead of a counter, for comparison.
#pragma once

#include "exchange.cuh"
#include "grid_sync.cuh"

namespace in_kernel {

// Must equal STAGE_BYTES and MOST_WARPS of stream.py. Nobody uses the copies, so a stage is free as
// soon as its bytes have arrived, and kccl::Ring, which has consumers, would only take time.
constexpr uint32_t kStreamStages = 12, kStreamBytes = 8192, kStreamWarps = 4;
constexpr uint32_t kStreamThreads = kStreamWarps * kccl::platform::kWarpSize;
struct StreamStages {
    alignas(128) uint8_t stage[kStreamStages][kStreamBytes];
    kccl::mem::CopyBarrier landed[kStreamStages];
};

// Why a warp of the stream has ended: the host has told it, or its time is over.
constexpr uint32_t kTold = 1, kTimedOut = 2;
// Copies of a warp between two looks at the clock and at `stop`.
constexpr uint64_t kCopiesAtOnce = 32;

// Copies the block's part of `data`, of num_copies stages, again and again until *stop is not zero.
// The warps take the stages of the part in turn; it has at least one for each.
// Dynamic shared memory: StreamStages.
//   in_flight: the copies in flight of the block, from the number of its warps to kStreamStages
//   progress:  for each warp of each block, its copies so far and the time in nanoseconds
//   ends:      for each warp, why it has ended, and the hardware's number of its multiprocessor
KCCL_KERNEL_OF(kStreamThreads)
void stream(const uint8_t* data, uint64_t num_copies, uint32_t in_flight, const uint32_t* stop,
            uint64_t limit_ns, kccl::mem::Packet* progress, uint32_t* ends) {
    using namespace kccl;
    auto& ring = *reinterpret_cast<StreamStages*>(platform::dynamic_shared());
    if (leads(block())) {
        for (uint32_t i = 0; i < kStreamStages; ++i) mem::init_copies(&ring.landed[i], 1);
        mem::fence_copies();
    }
    block().sync();
    const Warp coop = warp();
    const uint32_t warps = platform::threads_per_block() / platform::kWarpSize;
    const uint32_t mine = platform::thread_in_block() / platform::kWarpSize;
    const uint32_t me = platform::block_in_grid() * warps + mine;
    // This warp has the stages mine, mine + warps, ... below in_flight.
    const uint32_t num_stages = (in_flight - mine + warps - 1) / warps;
    const uint8_t* const from = data + platform::block_in_grid() * num_copies * kStreamBytes;
    uint64_t at = mine;  // which stage of the part is copied next
    const auto start = [&](uint32_t i) {
        const uint32_t stage = mine + i * warps;
        if (leads(coop)) mem::arrive_expecting(&ring.landed[stage], kStreamBytes);
        mem::copy_async(ring.stage[stage], from + at * kStreamBytes, kStreamBytes,
                        &ring.landed[stage], coop.index(), coop.size());
        at = at + warps < num_copies ? at + warps : mine;
    };
    // Copies wait for nobody, so this wait needs no limit.
    const auto await = [&](uint32_t i, uint32_t parity) {
        const mem::CopyBarrier* landed = &ring.landed[mine + i * warps];
        while (platform::warp_any(!mem::has_completed(landed, parity))) mem::poll_pause();
    };
    const uint64_t begin = mem::clock_ns();
    for (uint32_t i = 0; i < num_stages; ++i) start(i);
    uint32_t why = 0, told = 0, oldest = 0, parity = 0;
    const auto advance = [&] {
        if (++oldest < num_stages) return;
        oldest = 0;
        parity ^= 1u;
    };
    for (uint64_t done = 0; why == 0; advance(), ++done) {
        await(oldest, parity);
        if (done % kCopiesAtOnce == 0) {
            const uint64_t now = mem::clock_ns();
            // `told` is used kCopiesAtOnce copies later, so that the stream does not wait for this
            // load.
            if (told != 0) {
                why = kTold;
            } else if (now - begin > limit_ns) {
                why = kTimedOut;
            }
            told = mem::load<Order::kRelaxed, Scope::kDevice>(stop);
            if (leads(coop)) {
                mem::store_packet<Scope::kDevice>(progress + me, mem::Packet{{done + 1, now}});
            }
        }
        if (why == 0) start(oldest);
    }
    // A block must not end before its copies.
    for (uint32_t left = num_stages - 1; left > 0; --left, advance()) await(oldest, parity);
    if (!leads(coop)) return;
    mem::store_plain(ends + 2 * me, why);
    mem::store_plain(ends + 2 * me + 1, mem::unit_id());
}

KCCL_DEVICE uint8_t* end_of_board(const DeviceComm& comm) {
    const uint64_t packets =
        uint64_t{kKcclNumExchangeSlots} * comm.layout.exchange_bytes / kccl::kPayloadBytes;
    return reinterpret_cast<uint8_t*>(kccl::board(comm, kKcclReachRank, comm.rank) + packets);
}

// A barrier of all blocks that counts in COUNTERS words, 4 KiB apart at the end of the board. The
// blocks use them in turn, and thread i polls counter i. Each thread has POLLS loads in flight,
// issued at least SPACING ticks apart: beside a stream a load takes long, and a block that has one
// at a time learns late that all have arrived.
template <Order ORDER, uint32_t COUNTERS, uint32_t POLLS, uint32_t SPACING = 128>
class Counted {
  public:
    static constexpr bool kOrders = ORDER == Order::kAcqRel;
    static constexpr Scope kScope = Scope::kDevice;
    KCCL_DEVICE explicit Counted(const DeviceComm& comm) : comm_(comm), opened_(comm) {
        uint8_t* const end = end_of_board(comm);
        const auto counter = [&](uint32_t i) {
            return reinterpret_cast<uint32_t*>(end - (1 + i % COUNTERS) * kApart);
        };
        own_ = counter(own());
        polled_ = counter(block().index());
        // How many blocks add to the counter that this thread polls.
        each_ = (participants() - block().index() % COUNTERS + COUNTERS - 1) / COUNTERS;
        // Nobody adds before all blocks have read the counters, and none before the last kernel's
        // end.
        if (opened_.sync() != kKcclOk) return;
        wanted_ = kccl::mem::load<Order::kRelaxed, kScope>(polled_);
        if (opened_.sync() != kKcclOk) return;
        is_open_ = true;
    }

    KCCL_DEVICE Status call() {
        if (!is_open_) return kccl::status_of(comm_);
        const Block coop = block();
        wanted_ += each_;
        if constexpr (kOrders) coop.sync();
        if (leads(coop)) {
            kccl::mem::add<kOrders ? Order::kRelease : Order::kRelaxed, kScope>(own_, 1u);
        }
        if (coop.index() < kccl::platform::kWarpSize) {
            is_open_ = await();
            if constexpr (kOrders) kccl::mem::fence<Order::kAcquire, kScope>();
        }
        if (coop.any(!is_open_)) is_open_ = false;
        return is_open_ ? kKcclOk : kccl::status_of(comm_);
    }

    KCCL_DEVICE uint32_t participants() const { return kccl::platform::blocks_per_grid(); }
    KCCL_DEVICE uint32_t own() const { return kccl::platform::block_in_grid(); }

  private:
    static constexpr uint64_t kApart = 4096;

    // Waits until all blocks have arrived. Called by the first warp. Returns false if it failed.
    KCCL_DEVICE bool await() const {
        uint32_t seen[POLLS];
        KCCL_UNROLL
        for (uint32_t i = 0; i < POLLS; ++i) {
            seen[i] = kccl::mem::load<Order::kRelaxed, kScope>(polled_);
            const uint64_t begin = kccl::mem::clock_ticks();
            while (i + 1 < POLLS && kccl::mem::clock_ticks() - begin < SPACING) {
                kccl::mem::poll_pause();
            }
        }
        const auto poll = [&] {
            KCCL_UNROLL
            for (uint32_t i = 0; i < POLLS; ++i) {
                if (!kccl::platform::warp_any(!kccl::has_reached(seen[i], wanted_))) return true;
                seen[i] = kccl::mem::load<Order::kRelaxed, kScope>(polled_);
            }
            return false;
        };
        const auto missing = [&] { return kccl::Missing{1u << comm_.rank, seen[0], -1}; };
        return wait_until(comm_, kccl::Awaited{kKcclGridSync, 0, wanted_}, poll, missing);
    }

    const DeviceComm& comm_;
    kccl::GridBarrier opened_;
    uint32_t* own_ = nullptr;
    uint32_t* polled_ = nullptr;
    uint32_t each_ = 0;
    uint32_t wanted_ = 0;
    bool is_open_ = false;
};

// A barrier of all blocks without a counter, which topology/blocks.py calls "flat": each block
// has a flag in a line of its own at the end of the board, and thread i polls the flag of block i.
template <Order ORDER>
class Flagged {
  public:
    static constexpr bool kOrders = ORDER == Order::kAcqRel;
    static constexpr Scope kScope = Scope::kDevice;
    KCCL_DEVICE explicit Flagged(const DeviceComm& comm) : comm_(comm), opened_(comm) {
        uint8_t* const end = end_of_board(comm);
        const auto flag = [&](uint32_t i) {
            return reinterpret_cast<uint32_t*>(end - (1 + i) * kKcclLineBytes);
        };
        own_ = flag(own());
        polls_ = block().index() < participants();
        polled_ = flag(polls_ ? block().index() : own());
        // Nobody arrives before all blocks have read a flag: as in Counted.
        if (opened_.sync() != kKcclOk) return;
        wanted_ = kccl::mem::load<Order::kRelaxed, kScope>(flag(0));
        // Other barriers have counters in some of these lines. Nobody changes flag 0: it has this
        // value.
        if (leads(block())) kccl::mem::store<Order::kRelaxed, kScope>(own_, wanted_);
        if (opened_.sync() != kKcclOk) return;
        is_open_ = true;
    }
    KCCL_DEVICE Status call() {
        if (!is_open_) return kccl::status_of(comm_);
        const Block coop = block();
        ++wanted_;
        if constexpr (kOrders) coop.sync();
        if (leads(coop)) {
            kccl::mem::store<kOrders ? Order::kRelease : Order::kRelaxed, kScope>(own_, wanted_);
        }
        bool arrived = true;
        constexpr uint32_t kWarp = kccl::platform::kWarpSize;
        if (coop.index() / kWarp * kWarp < participants()) {
            uint32_t seen = 0;
            const auto poll = [&] {
                seen = kccl::mem::load<Order::kRelaxed, kScope>(polled_);
                return !polls_ || kccl::has_reached(seen, wanted_);
            };
            const auto missing = [&] { return kccl::Missing{1u << comm_.rank, seen, -1}; };
            arrived = wait_until(comm_, kccl::Awaited{kKcclGridSync, 0, wanted_}, poll, missing);
            if constexpr (kOrders) kccl::mem::fence<Order::kAcquire, kScope>();
        }
        if (coop.any(!arrived)) is_open_ = false;
        return is_open_ ? kKcclOk : kccl::status_of(comm_);
    }
    KCCL_DEVICE uint32_t participants() const { return kccl::platform::blocks_per_grid(); }
    KCCL_DEVICE uint32_t own() const { return kccl::platform::block_in_grid(); }

  private:
    const DeviceComm& comm_;
    kccl::GridBarrier opened_;
    uint32_t* own_ = nullptr;
    uint32_t* polled_ = nullptr;
    uint32_t wanted_ = 0;
    bool polls_ = false;
    bool is_open_ = false;
};

}  // namespace in_kernel
