// combine sends the experts' results back to the ranks that sent the rows, which weight and add
// them.
//
//     rank r:  row m of source s --copy--> area r of rank s          each result once
//              one packet to every rank
//              sum over a row's experts of weight * result --> out   polls its own memory only
//
// A row's sum is in FP32, from zero on, in ascending order of its experts; each product is rounded
// by itself; the sum is rounded once. So it has the same bits for any number of ranks, whatever
// arrives first.
#pragma once

#include "experts.cuh"

namespace kccl {
namespace expert_rows {

// A row's choices that name an expert, in ascending order of these experts. A choice is an index
// from 0 to top_k - 1, and has four bits.
struct Order {
    uint64_t choices = 0;
    uint32_t num = 0;

    KCCL_DEVICE uint32_t choice(uint32_t i) const { return choices >> 4 * i & 15; }
};
static_assert(kMostTopK <= 16, "four bits name a choice");

KCCL_DEVICE Order order_of(const int32_t* chosen, uint32_t top_k) {
    Order order;
    for (uint32_t j = 0; j < top_k; ++j) {
        const int32_t expert = mem::load_plain(chosen + j);
        if (expert < 0) continue;
        uint32_t before = 0;
        for (uint32_t k = 0; k < top_k; ++k) {
            const int32_t other = mem::load_plain(chosen + k);
            before += other >= 0 && (other < expert || (other == expert && k < j)) ? 1 : 0;
        }
        order.choices |= uint64_t{j} << 4 * before;
        ++order.num;
    }
    return order;
}

// Writes this warp's part of the results into half `half` of the windows of the ranks that sent the
// rows. Called by all threads of a warp.
template <class T>
KCCL_DEVICE void return_rows(const Experts& experts, const Areas& areas, const Slot& slot,
                             Workers workers, uint32_t half, const T* in, const uint32_t* counts) {
    const int rank = experts.window.rank, ranks = experts.window.world_size;
    const auto count_of = [&](uint32_t expert, int source) {
        return mem::load_plain(counts + expert * ranks + source);
    };
    const uint64_t each_expert = experts.rows_per_expert();
    each_row(workers, experts, count_of,
             [&](uint32_t expert, int source, uint32_t m, uint32_t row) {
                 const T* const from = in + (expert * each_expert + row) * experts.columns;
                 copy_by_warp(areas.slot(source, half, rank, expert, m), from, slot.row_bytes);
             });
}

// Adds the results of this warp's part of the rows, and stores the sums in `out`. Called by all
// threads of a warp.
template <class T>
KCCL_DEVICE void add_rows(const Experts& experts, const Areas& areas, Workers workers,
                          uint32_t halves, T* out, const Routes& routes, const float* weights) {
    constexpr uint32_t kPayloads = sizeof(mem::Line) / kPayloadBytes;
    constexpr uint32_t kElements = sizeof(mem::Line) / sizeof(T);
    // The number of results that a thread loads before it adds any.
    constexpr uint32_t kAtOnce = 4;
    const uint32_t columns = experts.columns, per_rank = experts.per_rank();
    const uint32_t num_lines = (columns + kElements - 1) / kElements;
    [[maybe_unused]] const platform::DefaultFloats floats{};
    share(workers, routes.num_rows, [&](uint32_t row, uint32_t part, uint32_t parts) {
        const uint64_t first = uint64_t{row} * routes.top_k;
        const Order order = order_of(routes.experts + first, routes.top_k);
        const auto result = [&](uint32_t i) {
            const uint64_t at = first + order.choice(i);
            const auto expert = static_cast<uint32_t>(mem::load_plain(routes.experts + at));
            const auto m = static_cast<uint32_t>(mem::load_plain(routes.slots + at));
            const uint32_t owner = expert / per_rank;
            return reinterpret_cast<const T*>(
                areas.slot(experts.window.rank, halves >> owner & 1, owner, expert % per_rank, m));
        };
        for (uint32_t line = part * warp().size() + warp().index(); line < num_lines;
             line += parts * warp().size()) {
            float sums[kElements] = {};
            for (uint32_t i = 0; i < order.num; i += kAtOnce) {
                uint64_t payloads[kAtOnce][kPayloads];
                float factors[kAtOnce];
                KCCL_UNROLL
                for (uint32_t n = 0; n < kAtOnce; ++n) {
                    if (i + n >= order.num) continue;
                    load_payloads(payloads[n], result(i + n), line * kPayloads, columns);
                    factors[n] = mem::load_plain(weights + first + order.choice(i + n));
                }
                KCCL_UNROLL
                for (uint32_t n = 0; n < kAtOnce; ++n) {
                    if (i + n >= order.num) continue;
                    T elements[kElements];
                    platform::copy_bytes(elements, payloads[n], sizeof(elements));
                    KCCL_UNROLL
                    for (uint32_t k = 0; k < kElements; ++k) {
                        sums[k] += mem::product(factors[n], Element<T>::widen(elements[k]));
                    }
                }
            }
            T elements[kElements];
            uint64_t payloads[kPayloads];
            KCCL_UNROLL
            for (uint32_t k = 0; k < kElements; ++k) elements[k] = Element<T>::narrow(sums[k]);
            platform::copy_bytes(payloads, elements, sizeof(payloads));
            store_payloads(out + uint64_t{row} * columns, line * kPayloads, columns, payloads);
        }
    });
}

template <class T>
KCCL_DEVICE Slot combine_slot(const Experts& experts) {
    static_assert(kKindOf<T> == Kind::kFloat && sizeof(T) <= sizeof(float),
                  "combine adds floats of at most 32 bits");
    return {experts.columns * sizeof(T), 0};
}

}  // namespace expert_rows

// Combines results on an open channel. Called by all threads of its coop (a thread, warp or block:
// coop.cuh). On every rank the same coop must make the call.
//
// Row i of `out` gets the sum over j of weights[i][j] times the result of expert
// routes.experts[i][j]. It is zero if the row has no expert. `out` is [num_rows][columns],
// `weights` is [num_rows][top_k]. `routes` are those of the dispatch, which has written their
// slots.
//
// `in` has the results of this rank's experts, in the places that their rows had in `out` of the
// dispatch. `counts` is that of the dispatch. T is a float, and may be another type than that of
// the dispatch.
//
// All arrays may be read and reused on return, by any thread of the coop. Other calls may come
// between a dispatch and its combine, and several dispatches may come before their combines.
template <class T, class Coop, int WORLD_SIZE>
KCCL_DEVICE Status combine(Channel<Coop, WORLD_SIZE>& channel, const Experts& experts, T* out,
                           const T* in, const uint32_t* counts, const Routes& routes,
                           const float* weights) {
    begin_together<kCoopKind<Coop>>(channel.comm(), "combine",
                                    {{"channel", static_cast<uint64_t>(channel.index())},
                                     {"out", out},
                                     {"in", in},
                                     {"counts", counts},
                                     {"num_rows", routes.num_rows}});
    const expert_rows::Slot slot = expert_rows::combine_slot<T>(experts);
    const expert_rows::Areas areas(experts, slot);
    const Status begun = expert_rows::begin<T>(channel, kKcclCombine, experts, slot, routes.top_k);
    if (begun != kKcclOk) return begun;
    return expert_rows::on_channel(
        channel, kKcclCombine, areas,
        [&](expert_rows::Workers workers, uint32_t half) KCCL_INLINED {
            expert_rows::return_rows(experts, areas, slot, workers, half, in, counts);
            return false;
        },
        [&](expert_rows::Workers workers, uint32_t halves) KCCL_INLINED {
            expert_rows::add_rows(experts, areas, workers, halves, out, routes, weights);
        });
}

// Opens the coop's own channel, makes this one call on it and closes it. Called by all threads of
// the coop.
template <class T, class Coop>
KCCL_DEVICE Status combine(Coop coop, const DeviceComm& comm, const Experts& experts, T* out,
                           const T* in, const uint32_t* counts, const Routes& routes,
                           const float* weights) {
    return on_one_channel(coop, comm, kOwnChannel, [&](Channel<Coop>& opened) KCCL_INLINED {
        return combine(opened, experts, out, in, counts, routes, weights);
    });
}

// Makes the same call by all blocks of the grid; every rank must have equally many. Called by all
// threads of all blocks. If other blocks wrote to the inputs, the caller must synchronise the
// blocks before. Any block may read `out` on return.
template <class T>
KCCL_DEVICE Status combine(Grid, const DeviceComm& comm, const Experts& experts, T* out,
                           const T* in, const uint32_t* counts, const Routes& routes,
                           const float* weights) {
    begin_together<CoopKind::kGrid>(
        comm, "combine",
        {{"out", out}, {"in", in}, {"counts", counts}, {"num_rows", routes.num_rows}});
    const expert_rows::Slot slot = expert_rows::combine_slot<T>(experts);
    const expert_rows::Areas areas(experts, slot);
    return expert_rows::by_grid(
        comm, kKcclCombine, areas,
        [&](Channel<Block>& channel) KCCL_INLINED {
            return expert_rows::begin<T>(channel, kKcclCombine, experts, slot, routes.top_k);
        },
        [&](expert_rows::Workers workers, uint32_t half) KCCL_INLINED {
            expert_rows::return_rows(experts, areas, slot, workers, half, in, counts);
            return false;
        },
        [&](expert_rows::Workers workers, uint32_t halves) KCCL_INLINED {
            expert_rows::add_rows(experts, areas, workers, halves, out, routes, weights);
        });
}

}  // namespace kccl
