// publish and collect: every block contributes a slice, every block reads the slices of all. Between
// the blocks of one GPU, or those of all ranks.
//
//     GridExchange<kKcclReachRank> exchange(comm);       opened once for many exchanges
//     for (...) {
//         publish(exchange, slice, count);               this block's part
//         collect(exchange, all, count);                 [rank][block][count]
//     }
//
// collect_reduced() in place of collect() gives [block][count], reduced over the ranks: an all_reduce
// that is complete, in every block, after one crossing. Blocks that need some of the slices collect
// only those: what every block polls is what an exchange of long messages costs.
#pragma once

#include "grid_exchange.cuh"
#include "reduce.cuh"

namespace kccl {

// Packets of a slice of `count` elements. An empty one has a packet too.
template <class T>
KCCL_DEVICE uint64_t num_slice_packets(uint32_t count) {
    return count == 0 ? 1 : (uint64_t{count} * sizeof(T) + kPayloadBytes - 1) / kPayloadBytes;
}

// Begins an exchange: this block's slice, `count` elements of T, as many for every block of every
// rank; zero is only a meeting. collect() of the same count follows. Called by all threads of the
// block, all get the same status. `in` may be reused when collect() has returned.
//
// kAcqRel: what any thread of the block wrote before is visible to whoever has collected. kRelaxed:
// the slices are, and nothing else; what other threads of the block wrote to `in` is synchronised by
// the caller.
template <mem::Order order = mem::Order::kAcqRel, class T, KcclReach REACH, int WORLD_SIZE>
KCCL_DEVICE Status publish(GridExchange<REACH, WORLD_SIZE>& exchange, const T* in, uint32_t count) {
    static_assert(order == mem::Order::kAcqRel || order == mem::Order::kRelaxed,
                  "an exchange orders both ways or not at all");
    const Status entered = exchange.next(num_slice_packets<T>(count));
    if (entered != kKcclOk) return entered;
    const uint32_t num_packets = exchange.num_packets();
    if constexpr (order == mem::Order::kAcqRel) block().sync();
    bool is_fenced = order == mem::Order::kRelaxed;
    const auto send = [&](uint32_t i, uint64_t payload) {
        if (!is_fenced) mem::fence<mem::Order::kAcqRel, kScopeOf<REACH>>();
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
        // Of an empty slice nothing is read.
        for (uint32_t i = exchange.thread(); i < num_packets; i += size) {
            send(i, load_payload(in, i, count, false));
        }
    }
    return kKcclOk;
}

// What a block collects of an exchange: so many slices, from the first.
struct Slices {
    uint32_t first;
    uint32_t num;
};

// How the payloads of `out` are made of packets: `num` of them, `stride` apart, ROWS at most.
template <int ROWS>
struct Rows {
    int num;
    uint32_t stride;
};

// The next payloads of each thread, at most N, of the slices; `at` goes on behind them. False: the
// wait failed. combine(packets' payloads) -> payload.
template <int N, int ROWS, class T, KcclReach REACH, int WORLD_SIZE, class Combine>
KCCL_DEVICE bool collect_next(GridExchange<REACH, WORLD_SIZE>& exchange, T* out, uint32_t count,
                              Slices slices, Rows<ROWS> rows, bool are_words, SlicePacket* at,
                              Combine combine) {
    SlicePacket mine[N];
    uint32_t places[N * ROWS];
    uint64_t payloads[N * ROWS];
    KCCL_UNROLL
    for (int n = 0; n < N; ++n) {
        mine[n] = *at;
        const uint32_t place = at->slice < slices.num
                                   ? exchange.place_of({slices.first + at->slice, at->packet})
                                   : exchange.kSomePlace;
        KCCL_UNROLL
        for (int row = 0; row < ROWS; ++row) {
            places[n * ROWS + row] = place + (row < rows.num ? row : 0) * rows.stride;
        }
        *at = exchange.after(*at);
    }
    if (!exchange.await(places, N * ROWS, payloads)) return false;
    KCCL_UNROLL
    for (int n = 0; n < N; ++n) {
        if (count == 0 || mine[n].slice >= slices.num) continue;
        store_payload(out + uint64_t{mine[n].slice} * count, mine[n].packet, count,
                      combine(&payloads[n * ROWS]), are_words);
    }
    return true;
}

// What collect() and collect_reduced() have in common. IS_PART: the slices are not those of all
// blocks.
template <mem::Order order, bool IS_PART, int ROWS, class T, KcclReach REACH, int WORLD_SIZE,
          class Combine>
KCCL_DEVICE Status collect_rows(GridExchange<REACH, WORLD_SIZE>& exchange, T* out, uint32_t count,
                                Slices slices, Rows<ROWS> rows, Combine combine) {
    // So many payloads of a thread are on their way at once. One is a path of its own, because small
    // exchanges are the ones that matter.
    constexpr int kAtOnce = ROWS <= 2 ? 2 : 1;
    if (exchange.status() != kKcclOk) return exchange.status();
    const uint32_t size = exchange.num_threads();
    const uint32_t thread = exchange.thread();
    const uint32_t total = slices.num * exchange.num_packets();
    const bool words = count != 0 && are_words(out, count);
    bool failed = IS_PART && !exchange.meet();
    if (failed) {
        // The status says it.
    } else if (words && total <= size) {
        const uint32_t first = exchange.place_of({slices.first, 0}) + exchange.first_place();
        const uint32_t place = thread < total ? first : exchange.kSomePlace;
        uint32_t places[ROWS];
        uint64_t payloads[ROWS];
        KCCL_UNROLL
        for (int row = 0; row < ROWS; ++row) places[row] = place + row * rows.stride;
        failed = !exchange.await(places, rows.num, payloads);
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
        mem::fence<mem::Order::kAcqRel, kScopeOf<REACH>>();
    }
    return exchange.leave(failed);
}

// Ends an exchange: `out` becomes the slices of all blocks, [rank][block][count], or with reach rank
// [block][count]. Called by all threads of the block, which may all read it on return; all get the
// same status, and unless it is ok, `out` is undefined. Blocks have an `out` of their own, in
// block-shared memory or not. Orders: see publish(), where the same order stands.
template <mem::Order order = mem::Order::kAcqRel, class T, KcclReach REACH, int WORLD_SIZE>
KCCL_DEVICE Status collect(GridExchange<REACH, WORLD_SIZE>& exchange, T* out, uint32_t count) {
    return collect_rows<order, false>(exchange, out, count, Slices{0, exchange.num_slices()},
                                      Rows<1>{1, 0},
                                      [](const uint64_t* payloads) { return payloads[0]; });
}

// The same of some of these slices, [slice][count]; they lie within the exchange's. In the same
// exchange some blocks may collect all, others parts. Which ones is each block's own business, as
// long as on every rank each slice is collected by a block that is not the one that published it,
// where there are two: a packet that nobody has seen may still be on its way when its place is
// written again.
template <mem::Order order = mem::Order::kAcqRel, class T, KcclReach REACH, int WORLD_SIZE>
KCCL_DEVICE Status collect(GridExchange<REACH, WORLD_SIZE>& exchange, T* out, uint32_t count,
                           Slices slices) {
    return collect_rows<order, true>(exchange, out, count, slices, Rows<1>{1, 0},
                                     [](const uint64_t* payloads) { return payloads[0]; });
}

template <class Op, mem::Order order, bool IS_PART, class T, int WORLD_SIZE>
KCCL_DEVICE Status collect_sums(GridExchange<kKcclReachAllRanks, WORLD_SIZE>& exchange, T* out,
                                uint32_t count, Slices slices) {
    constexpr int kMostRanks = GridExchange<kKcclReachAllRanks, WORLD_SIZE>::kMostRanks;
    const int world_size = exchange.num_senders();
    const auto combine = [&](const uint64_t* payloads) {
        return reduce_payloads<T, Op, 1, kMostRanks>(payloads, world_size);
    };
    return collect_rows<order, IS_PART>(exchange, out, count, slices,
                                        Rows<kMostRanks>{world_size, exchange.rank_stride()},
                                        combine);
}

// Ends an exchange of all ranks: `out` becomes [block][count], the slices of each block reduced
// element-wise over the ranks. Otherwise as collect().
template <class Op = Sum, mem::Order order = mem::Order::kAcqRel, class T, int WORLD_SIZE>
KCCL_DEVICE Status collect_reduced(GridExchange<kKcclReachAllRanks, WORLD_SIZE>& exchange, T* out,
                                   uint32_t count) {
    return collect_sums<Op, order, false>(exchange, out, count, Slices{0, exchange.num_blocks()});
}

// The same of some of the blocks' slices, [slice][count]; which ones: see above.
template <class Op = Sum, mem::Order order = mem::Order::kAcqRel, class T, int WORLD_SIZE>
KCCL_DEVICE Status collect_reduced(GridExchange<kKcclReachAllRanks, WORLD_SIZE>& exchange, T* out,
                                   uint32_t count, Slices slices) {
    return collect_sums<Op, order, true>(exchange, out, count, slices);
}

}  // namespace kccl
