// The common part of dispatch.cuh and combine.cuh, which move rows for experts. In a layer of
// experts each row of a rank goes to the `top_k` experts that a router has chosen for it, which
// other ranks own. Dispatch moves the rows there, combine moves the results back and adds them.
//
// Expert e belongs to rank e / per_rank(), so the last ranks may own fewer experts than the others.
//
// Rows travel through a window. In its part each rank has two halves, each with an area of every
// rank, which only that rank writes:
//
//     line 0: which half of the peers' windows this rank writes next
//     [half][writer]:  uint32 counts[expert]          dispatch: rows that the writer has sent
//                      slots[expert][capacity]        a row, and behind it its scales
//
// In a dispatch `expert` counts the experts of the reader, in a combine those of the writer. Row m
// of a writer for an expert lies in slot m: its rows are counted in the order of the routes. So
// results do not depend on which row arrives first.
//
// Rows are plain stores. Behind them each coop releases and sends every rank one packet, which says
// in which half they lie. The reader acquires. A writer changes its half in each call. When it
// writes in call k, it has had every peer's packets of call k-1. A peer sends these after its call
// k-2 has ended, that is, after it has read the half. So no rank reads what is overwritten,
// whatever else is called in between. After a reset the ranks' halves may differ, which is why
// packets name them.
#pragma once

#include "exchange.cuh"
#include "one_call.cuh"

namespace kccl {

// The ranks of the experts, and the memory through which rows travel. All ranks pass the same.
//
// The window belongs to these calls: nothing else writes it. All calls with it, dispatches and
// combines in any order, come one after the other, on every rank in the same order and by the same
// kind of coop. They may be in one kernel or in several on one stream.
struct Experts {
    Window window;         // at least experts_bytes() long
    uint32_t num_experts;  // the experts of all ranks; at least 1
    uint32_t capacity;     // rows that one rank may send to one expert in a call
    uint32_t columns;      // elements of a row

    // Returns the number of experts of a rank. The last ranks may have fewer.
    KCCL_DEVICE uint32_t per_rank() const {
        const auto ranks = static_cast<uint32_t>(window.world_size);
        return (num_experts + ranks - 1) / ranks;
    }
    KCCL_DEVICE uint32_t first_of(int rank) const {
        const uint32_t first = rank * per_rank();
        return first < num_experts ? first : num_experts;
    }
    // Returns the number of experts of this rank.
    KCCL_DEVICE uint32_t num_own() const {
        return first_of(window.rank + 1) - first_of(window.rank);
    }
    // Returns for how many rows of each expert `out` of a dispatch has room.
    KCCL_DEVICE uint64_t rows_per_expert() const {
        return uint64_t{capacity} * static_cast<uint32_t>(window.world_size);
    }
};

// The experts to which a rank's rows are sent. Both arrays are [num_rows][top_k].
struct Routes {
    const int32_t* experts;  // the expert of each route; a negative number: none
    int32_t* slots;          // dispatch writes to which slot each row went; combine reads it
    uint32_t num_rows;
    uint32_t top_k;
};

// Scales that travel with rows, like those of FP8. A row has `per_row` scales, which may be 0.
struct Scales {
    float* out = nullptr;       // [own expert][rows_per_expert()][per_row]
    const float* in = nullptr;  // [num_rows][per_row]
    uint32_t per_row = 0;
};

// The most experts that one row may go to.
constexpr uint32_t kMostTopK = 16;

namespace expert_rows {

KCCL_CONSTEXPR uint64_t round_up(uint64_t num, uint64_t unit) {
    return (num + unit - 1) / unit * unit;
}

// The lengths in a slot, which has a row and then its scales, both aligned for the widest copies.
struct Slot {
    uint64_t row_bytes;
    uint64_t scale_bytes;

    KCCL_CONSTEXPR uint64_t scales_at() const { return round_up(row_bytes, sizeof(mem::Line)); }
    KCCL_CONSTEXPR uint64_t num_bytes() const {
        return scales_at() + round_up(scale_bytes, sizeof(mem::Line));
    }
};

KCCL_CONSTEXPR uint64_t area_bytes(uint32_t per_rank, uint32_t capacity, const Slot& slot) {
    const uint64_t counts = round_up(per_rank * sizeof(uint32_t), kKcclLineBytes);
    return round_up(counts + uint64_t{per_rank} * capacity * slot.num_bytes(), kKcclLineBytes);
}

// Computes addresses in the areas of a window. Where areas begin depends only on the window's
// length, so calls with rows of different lengths use the same areas.
class Areas {
  public:
    KCCL_DEVICE Areas(const Experts& experts, const Slot& slot)
        : experts_(experts),
          slot_bytes_(slot.num_bytes()),
          counts_bytes_(round_up(experts.per_rank() * sizeof(uint32_t), kKcclLineBytes)),
          stride_((experts.window.num_bytes - kKcclLineBytes) /
                  (2 * experts.window.world_size * uint64_t{kKcclLineBytes}) * kKcclLineBytes) {}

    // Returns the address in `rank`'s window of `writer`'s number of rows for an expert. `expert`
    // counts the experts of one rank, here and in slot().
    KCCL_DEVICE uint32_t* count(int rank, uint32_t half, int writer, uint32_t expert) const {
        return reinterpret_cast<uint32_t*>(area(rank, half, writer)) + expert;
    }
    KCCL_DEVICE uint8_t* slot(int rank, uint32_t half, int writer, uint32_t expert,
                              uint32_t m) const {
        return area(rank, half, writer) + counts_bytes_ +
               (uint64_t{expert} * experts_.capacity + m) * slot_bytes_;
    }
    // Returns the address of the word that says which of its two halves this rank writes next.
    KCCL_DEVICE uint32_t* next_half() const { return experts_.window.local<uint32_t>(); }

  private:
    KCCL_DEVICE uint8_t* area(int rank, uint32_t half, int writer) const {
        const uint64_t index = half * experts_.window.world_size + writer;
        return experts_.window.at(rank, kKcclLineBytes + index * stride_);
    }

    const Experts& experts_;
    const uint64_t slot_bytes_;
    const uint64_t counts_bytes_;
    const uint64_t stride_;
};

// The warps that share the work of a call: this warp's number among them, and how many they are.
struct Workers {
    uint32_t index;
    uint32_t size;
};
KCCL_DEVICE Workers workers_of(Warp) { return {0, 1}; }
KCCL_DEVICE Workers workers_of(Block) {
    return {platform::thread_in_block() / platform::kWarpSize,
            platform::threads_per_block() / platform::kWarpSize};
}
KCCL_DEVICE Workers workers_of(Grid) {
    const Workers of_block = workers_of(block());
    return {platform::block_in_grid() * of_block.size + of_block.index,
            platform::blocks_per_grid() * of_block.size};
}
KCCL_DEVICE bool is_first(Workers workers) { return workers.index == 0 && leads(warp()); }

// Divides `count` items among the warps that make the call. Calls use(number, part, parts) for each
// piece of this warp's work: part `part`, of `parts`, of item `number`. Called by all threads of a
// warp.
template <class Use>
KCCL_DEVICE void share(Workers workers, uint32_t count, Use use) {
    if (count == 0) return;
    const uint32_t parts = workers.size > count ? workers.size / count : 1;
    for (uint32_t unit = workers.index; unit < parts * count; unit += workers.size) {
        use(unit % count, unit / count, parts);
    }
}

// Calls use(expert, source, m, row) for this warp's part of all rows that this rank's experts got:
// row m of `source` for `expert`, which is row `row` of the expert when the sources' rows follow
// each other. count_of(expert, source): the number of rows of `source` for `expert`. Called by all
// threads of a warp.
template <class CountOf, class Use>
KCCL_DEVICE void each_row(Workers workers, const Experts& experts, CountOf count_of, Use use) {
    const auto ranks = static_cast<uint32_t>(experts.window.world_size);
    share(workers, experts.num_own() * ranks, [&](uint32_t pair, uint32_t part, uint32_t parts) {
        const uint32_t expert = pair / ranks, source = pair % ranks;
        uint32_t before = 0, mine = 0;
        KCCL_UNROLL
        for (uint32_t each = 0; each < kKcclMaxWorldSize; ++each) {
            const uint32_t count = each <= source ? count_of(expert, each) : 0;
            if (each < source) before += count;
            if (each == source) mine = count;
        }
        for (uint32_t m = part; m < mine; m += parts) use(expert, source, m, before + m);
    });
}

// Copies a row or its scales. Called by all threads of a warp.
KCCL_DEVICE void copy_by_warp(void* to, const void* from, uint64_t num_bytes) {
    mem::copy(to, from, num_bytes, warp().index(), warp().size());
}

// Checks the arguments of a call, and refuses those with which it cannot be made. Called by all
// threads of the coop (a thread, warp or block: coop.cuh), which all get the status.
template <class T, class Coop, int WORLD_SIZE>
KCCL_DEVICE Status begin(Channel<Coop, WORLD_SIZE>& channel, uint32_t kernel,
                         const Experts& experts, const Slot& slot, uint32_t top_k) {
    if (experts.num_experts == 0) return refuse_on(channel, kernel, {kKcclArgumentExpert, 0, 0});
    if (top_k > kMostTopK) return refuse_on(channel, kernel, {kKcclArgumentTopK, top_k, kMostTopK});
    const uint64_t area = area_bytes(experts.per_rank(), experts.capacity, slot);
    const uint64_t least = kKcclLineBytes + 2 * experts.window.world_size * area;
    if (least > experts.window.num_bytes) {
        return refuse_on(channel, kernel, {kKcclArgumentNumBytes, least, experts.window.num_bytes});
    }
    channel.tell({kernel, area, kDtypeOf<T>});
    return channel.none();
}

// Tells all ranks that this coop has written its rows into `half`, and waits until the rows of all
// ranks have come. *halves gets a bit for each rank: the half in which its rows lie. failed:
// whether this thread has refused an argument. Then the call fails and sends no packets. Called by
// all threads of the coop, which all get the same status. It is also a sync of the coop.
template <class Coop, int WORLD_SIZE>
KCCL_DEVICE Status exchange_halves(Channel<Coop, WORLD_SIZE>& channel, uint32_t kernel, bool failed,
                                   uint32_t half, uint32_t* halves) {
    // The vote is also a sync, so that the fence behind it orders what all threads have written.
    const Status sent = channel.leave(failed);
    if (sent != kKcclOk) return sent;
    const bool leads = channel.thread() == 0;
    if (leads) mem::fence<mem::Order::kRelease, mem::Scope::kSystem>();
    const auto send = [&](uint32_t i, bool) { ll16::push(channel, i, half); };
    const auto take = [&](uint32_t i, bool, bool) {
        uint64_t payloads[kMaxRanks<WORLD_SIZE>];
        if (!ll16::await_all(channel, i, payloads)) return false;
        *halves = 0;
        KCCL_UNROLL
        for (int source = 0; source < kMaxRanks<WORLD_SIZE>; ++source) {
            if (source >= channel.world_size()) break;
            *halves |= static_cast<uint32_t>(payloads[source]) << source;
        }
        // One thread's acquire is enough: the coop's sync at the end of exchange() lets the other
        // threads see what this one sees.
        if (leads) mem::fence<mem::Order::kAcquire, mem::Scope::kSystem>();
        return true;
    };
    return ll16::exchange(channel, kernel, Exchange::kPairwise, 1, true, send, take);
}

// Makes a call by the coop of an open channel. send(workers, half): writes this warp's part of the
// rows, and returns whether this thread has refused an argument. take(workers, halves): reads this
// warp's part of what has come. Called by all threads of the coop.
template <class Coop, int WORLD_SIZE, class Send, class Take>
KCCL_DEVICE Status on_channel(Channel<Coop, WORLD_SIZE>& channel, uint32_t kernel,
                              const Areas& areas, Send send, Take take) {
    const Workers workers = workers_of(channel.coop());
    const uint32_t half = mem::load_plain(areas.next_half()) & 1;
    uint32_t halves = 0;
    const bool failed = send(workers, half);
    const Status status = exchange_halves(channel, kernel, failed, half, &halves);
    if (status != kKcclOk) return status;
    if (is_first(workers)) mem::store_plain(areas.next_half(), half ^ 1);
    take(workers, halves);
    channel.coop().sync();
    return kKcclOk;
}

// Makes a call by all blocks of the grid, each on its own channel. begin(channel) -> Status checks
// the arguments. A sync of the grid ensures that the rows of all blocks have come before any is
// read. Called by all threads of all blocks.
template <class Begin, class Send, class Take>
KCCL_DEVICE Status by_grid(const DeviceComm& comm, uint32_t kernel, const Areas& areas, Begin begin,
                           Send send, Take take) {
    const Workers workers = workers_of(grid());
    uint32_t half = 0, halves = 0;
    {
        Channel<Block> channel(block(), comm, default_channel(block()), 0, Opening::kOneCall);
        channel.tell_of_grid();
        if (begin(channel) == kKcclOk) {
            half = mem::load_plain(areas.next_half()) & 1;
            exchange_halves(channel, kernel, send(workers, half), half, &halves);
        }
    }
    // The call fails if any block has failed.
    const Status status = grid_sync(comm);
    if (status != kKcclOk) return status;
    if (is_first(workers)) mem::store_plain(areas.next_half(), half ^ 1);
    take(workers, halves);
    return grid_sync(comm);
}

}  // namespace expert_rows

// Returns how long the window of Experts must be, on every rank. row_bytes and scale_bytes: the
// most bytes of one row and its scales in any call. per_rank: the experts of a rank, rounded up.
KCCL_CONSTEXPR uint64_t experts_bytes(int world_size, uint32_t per_rank, uint32_t capacity,
                                      uint64_t row_bytes, uint64_t scale_bytes = 0) {
    return kKcclLineBytes +
           2 * static_cast<uint64_t>(world_size) *
               expert_rows::area_bytes(per_rank, capacity, {row_bytes, scale_bytes});
}

}  // namespace kccl
