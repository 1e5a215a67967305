// Exchanges between the blocks of a grid, on one rank or on all. publish() and collect() are made
// of them. Each rank has a board in its scratch. Every block pushes the packets of its slice to the
// boards of all ranks that take part, and polls the packets of the slices on its own rank's board.
// The data is its own signal: ll16 packets (ll16.cuh).
//
// Why a slot of the board may be used again: exchange e uses slot e % 4, which e-4 used.
//   - Blocks may read this slot until they have left e-3: await_previous() polls it in e-3.
//   - A block leaves e-3 before it publishes in e-2.
//   - No block publishes in e before it has seen a packet that every block published in e-2 or
//     later. Every block publishes at least one, whatever the length. A block that collects all
//     slices sees them in the exchange itself. A block that collects a part waits in e-1 for
//     packets of e-2, by await_previous(). These came long ago, so this costs little while its own
//     are on their way. In the first exchange after an opening it waits for packets of that
//     exchange, because it does not know where earlier ones lie.
//   - Within a block, the sync that ends an exchange orders its threads.
// So the positions of slices, and the number of blocks, may change from one exchange to the next.
//
// Slices begin on lines of their own: a line that all blocks poll must not have several writers.
//
// Epochs wrap; twice a period the board is scrubbed, as channels are (scrub.cuh). The epoch of a
// block's last exchange lies in device memory, so graphs can be replayed. As with grid_sync, a
// kernel stores it for absent blocks too.
#pragma once

#include "barrier.cuh"
#include "grid.cuh"
#include "ll16.cuh"
#include "told.cuh"

namespace kccl {

// A packet, by its slice and its number within the slice.
struct SlicePacket {
    uint32_t slice;
    uint32_t packet;
};

template <KcclReach REACH>
constexpr mem::Scope kScopeOf = REACH == kKcclReachRank ? mem::Scope::kDevice : mem::Scope::kSystem;

// Makes the words of this rank's board old, when all its blocks have left the exchange before the
// one that is `awaited`. Returns when all ranks that take part have done so. Called by all threads
// of all blocks. A sync must follow, also in a kernel of one block.
template <KcclReach REACH>
KCCL_DEVICE_COLD Status scrub_board(const DeviceComm& comm, Awaited awaited) {
    const Block coop = block();
    GridBarrierOf<kKcclGridScrubs> blocks(comm);
    const uint64_t stale = static_cast<uint64_t>(awaited.wanted - comm.epoch_step) << 32;
    const uint64_t num_packets = kKcclNumExchangeSlots * comm.layout.exchange_bytes / kPayloadBytes;
    mem::Packet* const packets = board(comm, REACH, comm.rank);
    Status status = blocks.sync();
    for (uint64_t i = uint64_t{platform::block_in_grid()} * coop.size() + coop.index();
         status == kKcclOk && i < num_packets; i += platform::blocks_per_grid() * coop.size()) {
        mem::store_packet<kScopeOf<REACH>>(packets + i, mem::Packet{{stale, stale}});
    }
    if (status == kKcclOk) status = blocks.sync();
    if (REACH == kKcclReachRank || status != kKcclOk) return status;
    if (platform::block_in_grid() == 0) {
        arrive<mem::Order::kRelease>(coop, comm, 0, kKcclFlagScrub, awaited.wanted);
        status =
            await<mem::Order::kAcquire>(coop, comm, 0, kKcclFlagScrub, awaited, 0, comm.world_size);
    }
    return status == kKcclOk ? blocks.sync() : status;
}

// An exchange of the blocks of a kernel, on one rank or on all; opened once for many exchanges. All
// threads of all blocks open it, make the same exchanges and let it end. The blocks, at most
// kKcclMaxBlocks, are all resident, and equally many on every rank that takes part. As long as it
// is open, this rank's communicator may open no other one of this reach, in this kernel or in
// another: the second one fails with kKcclOpenedTwice.
//
// WORLD_SIZE: the communicator's world size, so that loops over ranks unroll; 0 for any size.
template <KcclReach REACH, int WORLD_SIZE = 0>
class GridExchange {
  public:
    static constexpr bool kIsLocal = REACH == kKcclReachRank;
    static constexpr mem::Scope kScope = kScopeOf<REACH>;
    static constexpr int kMostRanks = kIsLocal         ? 1
                                      : WORLD_SIZE > 0 ? WORLD_SIZE
                                                       : int{kKcclMaxWorldSize};

    // `comm` must outlive this object.
    KCCL_DEVICE explicit GridExchange(const DeviceComm& comm)
        : comm_(comm), num_blocks_(platform::blocks_per_grid()) {
        if (num_blocks_ > kKcclMaxBlocks) {
            status_ = refuse_grid(comm, kKcclGridExchange, num_blocks_);
            return;
        }
        if (WORLD_SIZE > 0 && WORLD_SIZE != comm.world_size) {
            status_ = refuse_by(
                block(), comm, kKcclGridExchange,
                {kKcclArgumentWorldSize, uint64_t{WORLD_SIZE}, uint64_t(comm.world_size)});
            return;
        }
        begin_together<CoopKind::kGrid>(comm, "GridExchange", {{"blocks", num_blocks_}}, 1,
                                        {.step = ExchangeStep::kOpen, .reach = REACH});
        const Status status = status_of(comm);
        first_epoch_ = epoch_ = mem::load_plain(epoch_word(platform::block_in_grid()));
        own_slice_ =
            mem::keep((kIsLocal ? 0 : comm.rank * num_blocks_) + platform::block_in_grid());
        for (int k = 0; k < kNumPeers; ++k) {
            outbox_[k] = mem::keep(board(comm, REACH, receiver(k)));
        }
        inbox_ = mem::keep(board(comm, REACH, comm.rank));
        thread_ = mem::keep(block().index());
        num_threads_ = mem::keep(block().size());
        step_ = mem::keep(comm.epoch_step);
        slot_packets_ =
            mem::keep(static_cast<uint32_t>(comm.layout.exchange_bytes / kPayloadBytes));
        const uint32_t slot = ((epoch_ & step_) != 0 ? 1 : 0) + ((epoch_ & 2 * step_) != 0 ? 2 : 0);
        offset_ = slot * slot_packets_;
        find_special();
        const bool second = is_second(comm, kMark, kKcclGridExchange);
        // The vote also separates the reads here from the writes at the end.
        if (block().any(status != kKcclOk || second)) status_ = status_of(comm);
        if (status_ == kKcclOk) mark_open(comm, kMark, true);
    }

    // Stores what the next opening of an exchange must know.
    KCCL_DEVICE ~GridExchange() {
        // After a failure nothing is stored: only reset() may follow, and it clears everything.
        if (status_ != kKcclOk) return;
        begin_together<CoopKind::kGrid>(comm_, "~GridExchange", {{"blocks", num_blocks_}}, 1,
                                        {.step = ExchangeStep::kClose, .reach = REACH});
        mark_open(comm_, kMark, false);
        if (epoch_ == first_epoch_) return;
        const uint32_t mine = platform::block_in_grid();
        if (leads(block())) mem::store_plain(epoch_word(mine), epoch_);
        const uint32_t stride = num_blocks_ * num_threads_;
        for (uint32_t absent = num_blocks_ * (1 + thread_) + mine; absent < kKcclMaxBlocks;
             absent += stride) {
            mem::store_plain(epoch_word(absent), epoch_);
        }
        block().sync();
    }

    GridExchange(const GridExchange&) = delete;
    GridExchange& operator=(const GridExchange&) = delete;

    KCCL_DEVICE const DeviceComm& comm() const { return comm_; }
    KCCL_DEVICE Status status() const { return status_; }
    KCCL_DEVICE uint32_t epoch() const { return epoch_; }
    KCCL_DEVICE uint32_t thread() const { return thread_; }
    KCCL_DEVICE uint32_t num_threads() const { return num_threads_; }
    // Returns the number of ranks that take part.
    KCCL_DEVICE int num_senders() const {
        return kIsLocal ? 1 : WORLD_SIZE > 0 ? WORLD_SIZE : comm_.world_size;
    }
    KCCL_DEVICE uint32_t num_blocks() const { return num_blocks_; }
    // Returns the number of slices of an exchange.
    KCCL_DEVICE uint32_t num_slices() const { return num_senders() * num_blocks_; }

    // Tells whether slices of num_packets packets fit. If not, next() refuses them.
    KCCL_DEVICE bool has_room(uint64_t num_packets) const {
        return stride_of(num_packets) * num_slices() <= slot_packets_;
    }

    // Enters the next exchange, whose slices have num_packets packets, at least 1. All threads of
    // the block call it and get the same status. After a failure the caller must publish nothing.
    KCCL_DEVICE Status next(uint64_t num_packets) {
        last_ = slot();
        // Most exchanges have the same shape as the one before.
        if (num_packets != num_packets_) lay_out(num_packets);
        if (status_ != kKcclOk) return status_;
        epoch_ += step_;
        offset_ += slot_packets_;
        if (offset_ == kKcclNumExchangeSlots * slot_packets_) offset_ = 0;
        platform::enter_call(comm_.state, kKcclGridExchange, REACH, epoch_);
        if (epoch_ == special_) enter_special();
        return status_;
    }

    // Returns the number of packets of a slice.
    KCCL_DEVICE uint32_t num_packets() const { return num_packets_; }
    // Return the packets that this thread collects, counted over [slice][packet]: the first one,
    // then every num_threads-th packet behind it.
    KCCL_DEVICE SlicePacket first() const { return first_; }
    KCCL_DEVICE SlicePacket after(SlicePacket at) const {
        at.slice += step_on_.slice;
        at.packet += step_on_.packet;
        if (at.packet < num_packets_) return at;
        return {at.slice + 1, at.packet - num_packets_};
    }

    // Returns where a packet lies in a slot of a board, in packets.
    KCCL_DEVICE uint32_t position_of(SlicePacket at) const {
        return at.slice * stride_ + at.packet;
    }
    KCCL_DEVICE uint32_t first_position() const { return first_position_; }
    // The position that a thread without a packet polls: every exchange has a packet there.
    static constexpr uint32_t kSomePosition = 0;
    // Returns the distance between the packets of the same block of two neighbouring ranks.
    KCCL_DEVICE uint32_t rank_stride() const { return num_blocks_ * stride_; }

    // Publishes packet i of this block's slice.
    KCCL_DEVICE void push(uint32_t i, uint64_t payload) {
        const uint32_t position = offset_ + own_slice_ * stride_ + i;
        const mem::Packet packet = ll16::pack(payload, epoch_);
        KCCL_UNROLL
        for (int k = 0; k < kMostRanks; ++k) {
            if (k < num_senders()) mem::store_packet<kScope>(outbox(k) + position, packet);
        }
    }

    // Waits for the packets at positions[0 .. num), and stores their payloads. Returns false if the
    // wait failed. Called by all threads of a warp, with the same `num`.
    template <int N>
    KCCL_DEVICE bool await(const uint32_t (&positions)[N], int num, uint64_t (&payloads)[N]) {
        return await_in(slot(), positions, num, payloads);
    }

    // Waits for a packet that every block published in the previous exchange; in the first exchange
    // after an opening, in this one. For blocks that collect only some slices. Returns false if it
    // failed. Called by all threads of a warp, after publishing.
    KCCL_DEVICE bool await_previous() {
        // An exchange with this epoch has begun with a scrub, which was a barrier of all blocks, so
        // nothing is left to wait for.
        if ((epoch_ << 1) == 0) return true;
        const Slot seen = last_.epoch == first_epoch_ ? slot() : last_;
        platform::enter_call(comm_.state, kKcclGridExchange, REACH, seen.epoch);
        constexpr int kAtOnce = 2;
        for (uint32_t first = 0; first < num_slices(); first += kAtOnce * num_threads_) {
            uint32_t positions[kAtOnce];
            uint64_t payloads[kAtOnce];
            KCCL_UNROLL
            for (int n = 0; n < kAtOnce; ++n) {
                const uint32_t slice = first + n * num_threads_ + thread_;
                positions[n] = slice < num_slices() ? slice * seen.stride : kSomePosition;
            }
            if (!await_in(seen, positions, kAtOnce, payloads)) return false;
        }
        platform::enter_call(comm_.state, kKcclGridExchange, REACH, epoch_);
        return true;
    }

    // Ends an exchange. failed: whether a wait of this thread has failed. Called by all threads of
    // the block, which all get the same status. It is also a sync of the block.
    KCCL_DEVICE Status leave(bool failed) {
        if (block().any(failed)) status_ = status_of(comm_);
        return status_;
    }

    // Tells the simulator that this block publishes this slice in this exchange. Called by all
    // threads of the block.
    KCCL_DEVICE void tell(told::Call call) const {
        if constexpr (told::kIsTold) {
            call.num_blocks = num_blocks_;
            if (leads(block())) told::slice_begins(comm_, REACH, epoch_, call);
        }
    }

    // Fails the exchange because of an argument. Called by all threads of the block.
    KCCL_DEVICE Status refuse(const Refused& why) {
        if (status_ == kKcclOk && leads(block())) kccl::refuse(comm_, kKcclGridExchange, 0, why);
        return leave(true);
    }

  private:
    // The number of peers; 0 if the compiler does not know it.
    static constexpr int kNumPeers = kIsLocal || WORLD_SIZE == 0 ? 0 : WORLD_SIZE - 1;
    static constexpr uint32_t kMark = 1 + REACH;
    static constexpr uint32_t kLinePackets = kKcclLineBytes / sizeof(mem::Packet);

    // An exchange's slot of the board: where it begins, and how far apart the slices lie, in
    // packets.
    struct Slot {
        uint32_t epoch;
        uint32_t offset;
        uint32_t stride;
    };
    KCCL_DEVICE Slot slot() const { return {epoch_, offset_, stride_}; }

    template <int N>
    KCCL_DEVICE bool await_in(Slot slot, const uint32_t (&positions)[N], int num,
                              uint64_t (&payloads)[N]) {
        const uint32_t epoch = slot.epoch;
        const mem::Packet* inbox[N];
        KCCL_UNROLL
        for (int n = 0; n < N; ++n) inbox[n] = inbox_ + (slot.offset + positions[n < num ? n : 0]);
        mem::Packet packets[N];
        // Loads all packets before it checks any, so that the load latencies overlap.
        const auto poll = [&] {
            KCCL_UNROLL
            for (int n = 0; n < N; ++n) {
                if (n < num) packets[n] = mem::load_packet<kScope>(inbox[n]);
            }
            bool are_valid = true;
            KCCL_UNROLL
            for (int n = 0; n < N; ++n) {
                if (n < num) are_valid &= ll16::is_valid(packets[n], epoch);
            }
            return are_valid;
        };
        const auto missing = [&] {
            Missing late = {0, 0};
            KCCL_UNROLL
            for (int n = 0; n < N; ++n) {
                if (n >= num || ll16::is_valid(packets[n], epoch)) continue;
                const uint32_t slice = positions[n] / slot.stride;
                const uint32_t rank = kIsLocal ? comm_.rank : slice / num_blocks_;
                late = {1u << rank, ll16::stale_flag(packets[n], epoch),
                        static_cast<int32_t>(slice % num_blocks_)};
            }
            return late;
        };
        if (!wait_until(comm_, Awaited{kKcclGridExchange, 0, epoch}, poll, missing)) return false;
        KCCL_UNROLL
        for (int n = 0; n < N; ++n) {
            if (n < num) payloads[n] = ll16::unpack(packets[n]);
        }
        return true;
    }

    static KCCL_DEVICE uint64_t stride_of(uint64_t num_packets) {
        return (num_packets + kLinePackets - 1) / kLinePackets * kLinePackets;
    }

    KCCL_DEVICE void lay_out(uint64_t num_packets) {
        const uint64_t stride = stride_of(num_packets);
        const uint64_t total = stride * num_slices();
        if (total > slot_packets_) {
            if (status_ == kKcclOk && leads(block())) {
                refuse_length(comm_, kKcclGridExchange, 0, total * kPayloadBytes,
                              comm_.layout.exchange_bytes);
            }
            leave(true);
            return;
        }
        num_packets_ = static_cast<uint32_t>(num_packets);
        stride_ = static_cast<uint32_t>(stride);
        first_ = {thread_ / num_packets_, thread_ % num_packets_};
        first_position_ = mem::keep(position_of(first_));
        step_on_ = {num_threads_ / num_packets_, num_threads_ % num_packets_};
    }

    // Computes the next epoch at which an exchange takes the slow path, enter_special(): the second
    // exchange ever between ranks, and, twice a period, the one that scrubs. All others make only
    // one comparison.
    KCCL_DEVICE void find_special() {
        constexpr uint32_t kHalfAPeriod = 0x80000000u;
        special_ = (epoch_ & kHalfAPeriod) + kHalfAPeriod;
        if (!kIsLocal && epoch_ <= step_) special_ = 2 * step_;
    }

    KCCL_DEVICE void enter_special() {
        // By now this rank has received packets of all ranks: sets KcclState.contacted. The store
        // is on this slow path, so that no other exchange pays for it.
        if (!kIsLocal && epoch_ == 2 * step_ && platform::block_in_grid() == 0 && leads(block())) {
            mem::store<mem::Order::kRelaxed, mem::Scope::kDevice>(&state_of(comm_)->contacted, 1u);
        }
        if ((epoch_ << 1) == 0) {
            const Awaited scrubbed = {kKcclGridExchange, 0, epoch_};
            leave(scrub_board<REACH>(comm_, scrubbed) != kKcclOk);
            platform::enter_call(comm_.state, kKcclGridExchange, REACH, epoch_);
        }
        find_special();
    }

    KCCL_DEVICE uint32_t* epoch_word(uint32_t block) const {
        return exchange_epoch(comm_, REACH, block);
    }

    // Returns the board of receiver(k), from a register if the number of ranks is known.
    KCCL_DEVICE mem::Packet* outbox(int k) const {
        if (k == num_senders() - 1) return inbox_;
        return kNumPeers > 0 ? outbox_[k] : board(comm_, REACH, receiver(k));
    }

    // Returns the k-th rank to send to: first the peers, from the rank after this one, last itself.
    KCCL_DEVICE int receiver(int k) const {
        if (kIsLocal) return comm_.rank;
        const int rank = comm_.rank + 1 + k;
        return rank < num_senders() ? rank : rank - num_senders();
    }

    const DeviceComm& comm_;
    const uint32_t num_blocks_;
    // Addresses of slot 0 of the boards of the peers and of this rank.
    mem::Packet* outbox_[kNumPeers > 0 ? kNumPeers : 1] = {};
    mem::Packet* inbox_ = nullptr;
    uint32_t slot_packets_ = 0;  // length of a slot of the board, in packets
    uint32_t offset_ = 0;        // where this exchange's slot begins, in packets
    uint32_t num_packets_ = 0;   // packets of a slice
    uint32_t stride_ = 0;        // distance between slices, in packets
    uint32_t own_slice_ = 0;
    uint32_t first_position_ = 0;
    Slot last_ = {};  // slot of the previous exchange
    SlicePacket first_ = {};
    SlicePacket step_on_ = {};
    uint32_t thread_ = 0;
    uint32_t num_threads_ = 0;
    uint32_t step_ = 0;
    uint32_t epoch_ = 0;
    uint32_t first_epoch_ = 0;
    uint32_t special_ = 0;  // the next epoch at which an exchange takes the slow path
    Status status_ = kKcclOk;
};

}  // namespace kccl
