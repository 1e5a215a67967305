// Calls among the blocks of one lane, while the blocks of other lanes make the same calls among
// themselves (lanes.py). A table says which lane a block serves, by the multiprocessor that runs
// it. So a lane's multiprocessors can all be in one half of L2. LaneSync does what GridBarrier
// does, and LaneExchange what publish() and collect() do, each among a lane's blocks.
#pragma once

#include "beside.cuh"

namespace in_kernel {

// The seat of the block on a multiprocessor: lane << 16 | number within the lane. kNoSeat: the
// block makes no calls.
constexpr uint32_t kNoSeat = ~0u;

struct Seat {
    uint32_t lane;
    uint32_t index;
    uint32_t count;  // the blocks of each lane
};

KCCL_DEVICE Seat seat_of(const uint32_t* seats, uint32_t count) {
    const uint32_t seat = kccl::mem::load_plain(seats + kccl::mem::unit_id());
    if (seat == kNoSeat) return {kNoSeat, 0, count};
    return {seat >> 16, seat & 0xffffu, count};
}

// Tells the host that this block makes no calls.
KCCL_DEVICE void no_time(uint64_t* times) {
    if (leads(block())) {
        kccl::mem::store_plain(times + kccl::platform::block_in_grid(), uint64_t{0});
    }
}

// A barrier of a lane's blocks, with one counter. `words` has a line for each lane.
template <Order ORDER>
class LaneSync {
  public:
    static constexpr bool kOrders = ORDER == Order::kAcqRel;
    static constexpr Scope kScope = Scope::kDevice;

    // Called by all blocks of the kernel, also by those without a seat.
    KCCL_DEVICE LaneSync(const DeviceComm& comm, Seat seat, uint32_t* words)
        : comm_(comm), seat_(seat) {
        kccl::GridBarrier opened(comm);
        counter_ = kccl::mem::keep(words + (seat.lane == kNoSeat ? 0 : seat.lane) * kWordsOfLine);
        // Nobody adds before all blocks have read the counters.
        wanted_ = kccl::mem::load<Order::kRelaxed, kScope>(counter_);
        is_open_ = opened.sync() == kKcclOk;
    }

    KCCL_DEVICE Status call() {
        if (!is_open_) return kccl::status_of(comm_);
        const Block coop = block();
        wanted_ += seat_.count;
        if constexpr (kOrders) coop.sync();
        if (leads(coop)) {
            kccl::mem::add<kOrders ? Order::kRelease : Order::kRelaxed, kScope>(counter_, 1u);
        }
        if (coop.index() < kccl::platform::kWarpSize) {
            uint32_t seen = 0;
            const auto poll = [&] {
                seen = kccl::mem::load<Order::kRelaxed, kScope>(counter_);
                return kccl::has_reached(seen, wanted_);
            };
            const auto missing = [&] { return kccl::Missing{1u << comm_.rank, seen, -1}; };
            is_open_ = wait_until(comm_, kccl::Awaited{kKcclGridSync, 0, wanted_}, poll, missing);
            if constexpr (kOrders) kccl::mem::fence<Order::kAcquire, kScope>();
        }
        if (coop.any(!is_open_)) is_open_ = false;
        return is_open_ ? kKcclOk : kccl::status_of(comm_);
    }

    KCCL_DEVICE uint32_t participants() const { return seat_.count; }
    KCCL_DEVICE uint32_t own() const { return seat_.index; }

  private:
    const DeviceComm& comm_;
    const Seat seat_;
    uint32_t* counter_ = nullptr;
    uint32_t wanted_ = 0;
    bool is_open_ = false;
};

// words: a line for each lane, in which nothing else lies. boards: the board of each lane.
template <Order ORDER>
KCCL_KERNEL void lane_syncs(KCCL_KERNEL_PARAM(DeviceComm) comm, const uint32_t* seats,
                            uint32_t count, uint32_t* words, uint32_t warmup, uint32_t calls,
                            uint32_t checked, uint32_t* const* boards, uint32_t number,
                            const uint32_t* delays, uint64_t delay_stride, uint64_t* times,
                            uint32_t* late) {
    const Seat seat = seat_of(seats, count);
    LaneSync<ORDER> barrier(comm, seat, words);
    if (seat.lane == kNoSeat) return no_time(times);
    make_barriers<LaneSync<ORDER>, Notes::kMean>(barrier, warmup, calls, checked,
                                                 boards + seat.lane, 1, 0, number, delays,
                                                 delay_stride, times, late);
}

// The exchange of a lane's blocks. As in Exchange, a block publishes in call k the slice that it
// collected in call k - 1 from the block k positions further, with 1 added to every word. All
// blocks collect all slices of their lane, so two slots suffice. Each block has at least as many
// threads as there are packets.
template <Order ORDER>
class LaneExchange {
  public:
    static constexpr bool kOrders = ORDER == Order::kAcqRel;
    static constexpr Scope kScope = Scope::kDevice;
    static constexpr uint32_t kLinePackets = kKcclLineBytes / sizeof(kccl::mem::Packet);

    // board: the packets of this lane, two slots of seat.count slices of `each` words, in whole
    // lines. slice: the slice that this block publishes first; `first` is added to each word.
    // epoch: that of the last call of the launch before.
    KCCL_DEVICE LaneExchange(const DeviceComm& comm, Seat seat, kccl::mem::Packet* board,
                             uint64_t* memory, const uint64_t* slice, uint32_t each, uint64_t first,
                             uint32_t epoch)
        : comm_(comm),
          seat_(seat),
          each_(kccl::mem::keep(each)),
          stride_(kccl::mem::keep((each + kLinePackets - 1) / kLinePackets * kLinePackets)),
          num_words_(kccl::mem::keep(seat.count * each)),
          thread_(kccl::mem::keep(block().index())),
          board_(kccl::mem::keep(board)),
          to_(kccl::mem::keep(memory)),
          other_(kccl::mem::keep(memory + num_words_)),
          mine_(kccl::mem::keep(memory + 2 * uint64_t{num_words_})),
          next_(seat.index),
          epoch_(epoch) {
        if (thread_ < each) {
            kccl::mem::store_plain(mine_ + thread_, kccl::mem::load_plain(slice + thread_) + first);
        }
        const uint32_t at = thread_ < num_words_ ? thread_ : 0;
        polled_ = kccl::mem::keep(at / each * stride_ + at % each);
    }

    KCCL_DEVICE Status call() {
        const Block coop = block();
        ++epoch_;
        const uint32_t offset = (epoch_ & 1u) != 0 ? seat_.count * stride_ : 0;
        if constexpr (kOrders) coop.sync();
        if (thread_ < each_) {
            if constexpr (kOrders) kccl::mem::fence<Order::kRelease, kScope>();
            kccl::mem::store_packet<kScope>(
                board_ + offset + seat_.index * stride_ + thread_,
                kccl::ll16::pack(kccl::mem::load_plain(mine_ + thread_), epoch_));
        }
        // Polls begin when the fences have ended: as in publish().
        if constexpr (kOrders) coop.sync();
        kccl::mem::Packet packet = {};
        const auto poll = [&] {
            packet = kccl::mem::load_packet<kScope>(board_ + offset + polled_);
            return kccl::ll16::is_valid(packet, epoch_);
        };
        const auto missing = [&] {
            return kccl::Missing{1u << comm_.rank, kccl::ll16::stale_flag(packet, epoch_), -1};
        };
        const bool came =
            wait_until(comm_, kccl::Awaited{kKcclGridExchange, 0, epoch_}, poll, missing);
        if (came && thread_ < num_words_) {
            kccl::mem::store_plain(to_ + thread_, kccl::ll16::unpack(packet));
        }
        if constexpr (kOrders) kccl::mem::fence<Order::kAcquire, kScope>();
        if (coop.any(!came)) return kccl::status_of(comm_);
        next_ = next_ + 1 < seat_.count ? next_ + 1 : 0;
        if (thread_ < each_) {
            kccl::mem::store_plain(
                mine_ + thread_,
                kccl::mem::load_plain(to_ + uint64_t{next_} * each_ + thread_) + 1);
        }
        uint64_t* const before = to_;
        to_ = other_;
        other_ = before;
        return kKcclOk;
    }

    // Copies all slices that the last call has collected to `out`.
    KCCL_DEVICE void keep_last(uint64_t* out) const {
        if (thread_ < num_words_) {
            kccl::mem::store_plain(out + thread_, kccl::mem::load_plain(other_ + thread_));
        }
    }

  private:
    const DeviceComm& comm_;
    const Seat seat_;
    const uint32_t each_;
    const uint32_t stride_;  // from one slice to the next, in packets
    const uint32_t num_words_;
    const uint32_t thread_;
    kccl::mem::Packet* const board_;
    uint64_t* to_;
    uint64_t* other_;
    uint64_t* const mine_;
    uint32_t polled_ = 0;
    uint32_t next_;
    uint32_t epoch_;
};

// board: `board_packets` packets for each lane. slices: [lane][block][each]. out:
// [lane][block][slice][each]. Dynamic shared memory: twice all slices of a lane plus one slice.
template <Order ORDER>
KCCL_KERNEL_OF(kMostThreads)
void lane_exchanges(KCCL_KERNEL_PARAM(DeviceComm) comm, const uint32_t* seats, uint32_t count,
                    kccl::mem::Packet* board, uint64_t board_packets, const uint64_t* slices,
                    uint64_t* out, uint32_t each, uint64_t first, uint32_t epoch, uint32_t warmup,
                    uint32_t calls, uint64_t* times) {
    const Seat seat = seat_of(seats, count);
    if (seat.lane == kNoSeat) return no_time(times);
    const CallCounts counts = counts_of_block<Notes::kMean>(warmup, calls, ~0u, nullptr, 0, times);
    const uint64_t place = uint64_t{seat.lane} * count + seat.index;
    LaneExchange<ORDER> form(comm, seat, board + seat.lane * board_packets,
                             reinterpret_cast<uint64_t*>(kccl::platform::dynamic_shared()),
                             slices + place * each, each, first, epoch);
    const Status status =
        make_calls<Notes::kMean>(counts, [&] { return form.call(); }, [](uint32_t) {});
    if (status == kKcclOk) form.keep_last(out + place * count * each);
}

}  // namespace in_kernel
