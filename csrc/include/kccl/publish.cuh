// publish and collect: every block contributes a slice, and reads the slices of all blocks of one
// GPU or of all ranks.
//
//     GridExchange<kKcclReachRank> exchange(comm);       opened once for many exchanges
//     for (...) {
//         publish(exchange, slice, count);               this block's slice
//         collect(exchange, all, count);                 [rank][block][count]
//     }
//
// collect_reduced() instead of collect() gives [block][count], reduced over the ranks. It is an
// all_reduce whose whole result every block has after data has crossed the links once. A block that
// needs only some slices should collect only those, because the time of an exchange of long
// messages depends on how much every block polls.
#pragma once

#include "grid_exchange.cuh"
#include "reduce.cuh"

namespace kccl {

// Returns how many packets a slice of `count` elements has. An empty slice has one too.
template <class T>
KCCL_DEVICE uint64_t num_slice_packets(uint32_t count) {
    return count == 0 ? 1 : (uint64_t{count} * sizeof(T) + kPayloadBytes - 1) / kPayloadBytes;
}

// Begins an exchange: publishes this block's slice, `count` elements of T at `in`. All blocks of
// all ranks must pass the same count; 0 makes the exchange a barrier only. The block must then call
// collect() with this count. Called by all threads of the block; all get the same status. `in` may
// be reused when collect() has returned.
//
// kAcqRel: what any thread of the block wrote before is visible to every block that has collected.
// kRelaxed: only the slices are visible. Then the caller must sync the block before, if other
// threads of it wrote to `in`.
template <mem::Order order = mem::Order::kAcqRel, class T, KcclReach REACH, int WORLD_SIZE>
KCCL_DEVICE Status publish(GridExchange<REACH, WORLD_SIZE>& exchange, const T* in, uint32_t count) {
    static_assert(order == mem::Order::kAcqRel || order == mem::Order::kRelaxed,
                  "an exchange orders both ways or not at all");
    begin_together<CoopKind::kGrid>(
        exchange.comm(), "publish", {{"count", count}, {"in", in}},
        exchange.has_room(num_slice_packets<T>(count)) ? 1 : 0,
        {.step = ExchangeStep::kPublish, .reach = REACH, .num_bytes = uint64_t{count} * sizeof(T)});
    const Status entered = exchange.next(num_slice_packets<T>(count));
    if (entered != kKcclOk) return entered;
    exchange.tell({kKcclGridExchange, uint64_t{count} * sizeof(T), kDtypeOf<T>});
    const uint32_t num_packets = exchange.num_packets();
    if constexpr (order == mem::Order::kAcqRel) block().sync();
    bool is_fenced = order == mem::Order::kRelaxed;
    const auto send = [&](uint32_t i, uint64_t payload) {
        if (!is_fenced) mem::fence<mem::Order::kRelease, kScopeOf<REACH>>();
        is_fenced = true;
        exchange.push(i, payload);
    };
    const uint32_t size = exchange.num_threads();
    if (count != 0 && are_words(in, count)) {
        const auto* words = reinterpret_cast<const uint64_t*>(in);
        for (uint32_t i = exchange.thread(); i < num_packets; i += size) {
            send(i, mem::load_plain(words + i));
        }
    } else {
        // An empty slice comes here too: load_payload() reads nothing of it and returns zero.
        for (uint32_t i = exchange.thread(); i < num_packets; i += size) {
            send(i, load_payload(in, i, count, false));
        }
    }
    // Polls begin when the fences have ended, because polls would delay them.
    if constexpr (order == mem::Order::kAcqRel) block().sync();
    return kKcclOk;
}

// The slices of an exchange that a block collects: `num` of them, from `first` on.
struct Slices {
    uint32_t first;
    uint32_t num;
};

// The packets from which one payload of `out` is computed: one in collect(), one of each rank in
// collect_reduced(). They are `num`, at most ROWS, and lie `stride` packets apart.
template <int ROWS>
struct Rows {
    int num;
    uint32_t stride;
};

// Collects this thread's next payloads of the slices, at most N, and moves `at` behind them.
// Returns false if the wait failed. combine(payloads): returns a payload of `out`, computed from
// the payloads of its packets.
template <int N, int ROWS, class T, KcclReach REACH, int WORLD_SIZE, class Combine>
KCCL_DEVICE bool collect_next(GridExchange<REACH, WORLD_SIZE>& exchange, T* out, uint32_t count,
                              Slices slices, Rows<ROWS> rows, bool are_words, SlicePacket* at,
                              Combine combine) {
    SlicePacket mine[N];
    uint32_t positions[N * ROWS];
    uint64_t payloads[N * ROWS];
    KCCL_UNROLL
    for (int n = 0; n < N; ++n) {
        mine[n] = *at;
        const uint32_t position = at->slice < slices.num
                                      ? exchange.position_of({slices.first + at->slice, at->packet})
                                      : exchange.kSomePosition;
        KCCL_UNROLL
        for (int row = 0; row < ROWS; ++row) {
            positions[n * ROWS + row] = position + (row < rows.num ? row : 0) * rows.stride;
        }
        *at = exchange.after(*at);
    }
    if (!exchange.await(positions, N * ROWS, payloads)) return false;
    KCCL_UNROLL
    for (int n = 0; n < N; ++n) {
        if (count == 0 || mine[n].slice >= slices.num) continue;
        store_payload(out + uint64_t{mine[n].slice} * count, mine[n].packet, count,
                      combine(&payloads[n * ROWS]), are_words);
    }
    return true;
}

// The common part of collect() and collect_reduced(). IS_PART: the block collects only some slices.
template <mem::Order order, bool IS_PART, int ROWS, class T, KcclReach REACH, int WORLD_SIZE,
          class Combine>
KCCL_DEVICE Status collect_rows(GridExchange<REACH, WORLD_SIZE>& exchange, T* out, uint32_t count,
                                Slices slices, Rows<ROWS> rows, Combine combine) {
    // The number of payloads of `out` for which a thread loads packets at once. Exchanges of at
    // most one payload a thread take a path of their own below, because small exchanges matter
    // most.
    constexpr int kAtOnce = ROWS <= 2 ? 2 : 1;
    begin_together<CoopKind::kGrid>(
        exchange.comm(), ROWS == 1 ? "collect" : "collect_reduced",
        {{"count", count},
         {"first slice", slices.first},
         {"number of slices", slices.num},
         {"out", out}},
        1,
        {.step = ExchangeStep::kCollect, .reach = REACH, .num_bytes = uint64_t{count} * sizeof(T)});
    if (exchange.status() != kKcclOk) return exchange.status();
    if constexpr (IS_PART) {
        const uint32_t most = rows.num == 1 ? exchange.num_slices() : exchange.num_blocks();
        if (slices.first > most || slices.num > most - slices.first) {
            const uint64_t end = uint64_t{slices.first} + slices.num;
            return exchange.refuse({kKcclArgumentSlices, end, most});
        }
    }
    const uint32_t size = exchange.num_threads();
    const uint32_t thread = exchange.thread();
    const uint32_t total = slices.num * exchange.num_packets();
    const bool words = count != 0 && are_words(out, count);
    bool failed = IS_PART && !exchange.await_previous();
    if (failed) {
        // Nothing is collected; leave() below fails the exchange.
    } else if (words && total <= size) {
        const uint32_t first = exchange.position_of({slices.first, 0}) + exchange.first_position();
        const uint32_t position = thread < total ? first : exchange.kSomePosition;
        uint32_t positions[ROWS];
        uint64_t payloads[ROWS];
        KCCL_UNROLL
        for (int row = 0; row < ROWS; ++row) positions[row] = position + row * rows.stride;
        failed = !exchange.await(positions, rows.num, payloads);
        if (!failed && thread < total) {
            mem::store_plain(reinterpret_cast<uint64_t*>(out) + thread, combine(&payloads[0]));
        }
    } else {
        SlicePacket at = exchange.first();
        for (uint32_t done = 0; done < total && !failed; done += kAtOnce * size) {
            failed =
                !collect_next<kAtOnce>(exchange, out, count, slices, rows, words, &at, combine);
        }
    }
    if constexpr (order == mem::Order::kAcqRel) {
        mem::fence<mem::Order::kAcquire, kScopeOf<REACH>>();
    }
    return exchange.leave(failed);
}

// Ends an exchange: `out` becomes the slices of all blocks, [rank][block][count], or with reach
// rank [block][count]. Called by all threads of the block, which may all read `out` on return. All
// get the same status; unless it is ok, `out` is undefined. Each block has an `out` of its own, in
// block-shared memory or elsewhere. order: the same as in publish().
template <mem::Order order = mem::Order::kAcqRel, class T, KcclReach REACH, int WORLD_SIZE>
KCCL_DEVICE Status collect(GridExchange<REACH, WORLD_SIZE>& exchange, T* out, uint32_t count) {
    return collect_rows<order, false>(exchange, out, count, Slices{0, exchange.num_slices()},
                                      Rows<1>{1, 0},
                                      [](const uint64_t* payloads) { return payloads[0]; });
}

// Ends an exchange as collect() above, but collects only `slices`: `out` becomes [slice][count]. In
// one exchange some blocks may collect all slices and others any part. But where a rank has two
// blocks or more, each slice must be collected on it by a block other than the one that published
// it: a packet that nobody has seen may still be on its way when its position is written again.
template <mem::Order order = mem::Order::kAcqRel, class T, KcclReach REACH, int WORLD_SIZE>
KCCL_DEVICE Status collect(GridExchange<REACH, WORLD_SIZE>& exchange, T* out, uint32_t count,
                           Slices slices) {
    return collect_rows<order, true>(exchange, out, count, slices, Rows<1>{1, 0},
                                     [](const uint64_t* payloads) { return payloads[0]; });
}

template <class Op, mem::Order order, bool IS_PART, class T, int WORLD_SIZE>
KCCL_DEVICE Status collect_sums(GridExchange<kKcclReachAllRanks, WORLD_SIZE>& exchange, T* out,
                                uint32_t count, Slices slices) {
    if constexpr (!kTakes<Op, T>) {
        return refuse_types<Op, T>();
    } else {
        constexpr int kMostRanks = GridExchange<kKcclReachAllRanks, WORLD_SIZE>::kMostRanks;
        if (told::kIsTold && exchange.status() == kKcclOk && leads(block())) {
            told::Call call = {kKcclGridExchange, uint64_t{count} * sizeof(T), kDtypeOf<T>};
            call.op = kOpOf<Op>;
            call.num_blocks = exchange.num_blocks();
            told::reduction_begins(exchange.comm(), exchange.epoch(), call);
        }
        const int world_size = exchange.num_senders();
        const auto combine = [&](const uint64_t* payloads) {
            return reduce_payloads<T, Op, 1, kMostRanks>(payloads, world_size);
        };
        return collect_rows<order, IS_PART>(exchange, out, count, slices,
                                            Rows<kMostRanks>{world_size, exchange.rank_stride()},
                                            combine);
    }
}

// Ends an exchange of all ranks: `out` becomes [block][count], the slices of each block reduced
// element-wise over the ranks. In all else it does what collect() does.
template <class Op = Sum, mem::Order order = mem::Order::kAcqRel, class T, int WORLD_SIZE>
KCCL_DEVICE Status collect_reduced(GridExchange<kKcclReachAllRanks, WORLD_SIZE>& exchange, T* out,
                                   uint32_t count) {
    return collect_sums<Op, order, false>(exchange, out, count, Slices{0, exchange.num_blocks()});
}

// Ends an exchange as collect_reduced() above, but only for the blocks `slices`: `out` becomes
// [slice][count]. See collect() for which slices a block may choose.
template <class Op = Sum, mem::Order order = mem::Order::kAcqRel, class T, int WORLD_SIZE>
KCCL_DEVICE Status collect_reduced(GridExchange<kKcclReachAllRanks, WORLD_SIZE>& exchange, T* out,
                                   uint32_t count, Slices slices) {
    return collect_sums<Op, order, true>(exchange, out, count, slices);
}

}  // namespace kccl
