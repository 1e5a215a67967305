// Calls between the blocks of a GPU while another kernel reads memory as fast as it can
// (beside.py). The stream is a kernel of its own: a block of one warp on each multiprocessor copies
// memory into block-shared memory, as the engine's producers do. Counted is grid_sync with other
// numbers of counters and polls, for comparison.
#pragma once

#include "exchange.cuh"
#include "grid_sync.cuh"

namespace in_kernel {

// Must equal STAGE_BYTES of stream.py.
using StreamRing = kccl::Ring<12, 8192>;

// Why a block of the stream has ended: the host has told it, its time is over, or a wait failed.
constexpr uint32_t kTold = 1, kTimedOut = 2, kFailed = 3;
// Copies between two looks at the clock and at `stop`.
constexpr uint64_t kCopiesAtOnce = 32;

// Copies the block's part of `data`, of num_copies stages, again and again until *stop is not zero.
// Dynamic shared memory: a StreamRing.
//   in_flight: the most copies in flight
//   progress:  for each block, the copies so far and the time in nanoseconds
//   ends:      for each block, why it has ended, and the hardware's number of its multiprocessor
KCCL_KERNEL_OF(32)
void stream(KCCL_KERNEL_PARAM(DeviceComm) comm, const uint8_t* data, uint64_t num_copies,
            uint32_t in_flight, const uint32_t* stop, uint64_t limit_ns,
            kccl::mem::Packet* progress, uint32_t* ends) {
    using namespace kccl;
    auto& ring = *reinterpret_cast<StreamRing*>(platform::dynamic_shared());
    init_ring(block(), ring, 1);
    Producer<StreamRing> producer(ring, comm);
    Consumer<StreamRing> consumer(ring, comm);
    const uint32_t me = platform::block_in_grid();
    const uint8_t* const from = data + me * num_copies * StreamRing::kStageBytes;
    const uint64_t begin = mem::clock_ns();
    uint64_t pushed = 0, at = 0;  // `at`: which stage of the part is copied next
    uint32_t why = 0, told = 0;
    for (uint64_t popped = 0; why == 0; ++popped) {
        // If the ring is full, a push would wait in vain: only this warp frees a stage.
        while (pushed - popped < StreamRing::kStages &&
               producer.try_push(from + at * StreamRing::kStageBytes, StreamRing::kStageBytes,
                                 in_flight)) {
            ++pushed;
            at = at + 1 < num_copies ? at + 1 : 0;
        }
        if (consumer.front() == nullptr) why = kFailed;
        if (why != 0) continue;
        consumer.pop();
        if (popped % kCopiesAtOnce != 0) continue;
        const uint64_t now = mem::clock_ns();
        // `told` is used 32 copies later, so that the stream does not wait for this load.
        if (told != 0) {
            why = kTold;
        } else if (now - begin > limit_ns) {
            why = kTimedOut;
        }
        told = mem::load<Order::kRelaxed, Scope::kDevice>(stop);
        if (leads(block())) {
            mem::store_packet<Scope::kDevice>(progress + me, mem::Packet{{popped + 1, now}});
        }
    }
    producer.drain();
    if (!leads(block())) return;
    mem::store_plain(ends + 2 * me, why);
    mem::store_plain(ends + 2 * me + 1, mem::unit_id());
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
        const uint64_t packets =
            uint64_t{kKcclNumExchangeSlots} * comm.layout.exchange_bytes / kccl::kPayloadBytes;
        auto* const end =
            reinterpret_cast<uint8_t*>(kccl::board(comm, kKcclReachRank, comm.rank) + packets);
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

}  // namespace in_kernel
