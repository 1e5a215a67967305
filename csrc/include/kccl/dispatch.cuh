// dispatch sends rows to the ranks that own their experts.
//
//     rank r:  the rows of expert e --copy--> area r of e's owner    all copies of a row are sent
//              one packet to every rank
//              areas of its own window --copy--> out                 polls its own memory only
//
// A warp sends the rows of an expert: it looks for them among all routes. Where there are more
// warps than experts, several share an expert's rows.
#pragma once

#include "experts.cuh"

namespace kccl {
namespace expert_rows {

// Fails this rank because it sends an expert too many rows. Called by one thread.
KCCL_DEVICE_COLD void refuse_count(const DeviceComm& comm, const Experts& experts, uint32_t expert,
                                   uint32_t count) {
    give_up(comm, Record{kKcclCapacityPassed, comm.rank, comm.rank, kKcclDispatch,
                         static_cast<int32_t>(expert), count, experts.capacity, 0, 0});
}

// Writes this warp's part of the rows into half `half` of the owners' windows. Returns true if a
// route is invalid or an expert gets too many rows; then this rank has failed. Called by all
// threads of a warp.
template <class T>
KCCL_DEVICE bool send_rows(const DeviceComm& comm, const Experts& experts, const Areas& areas,
                           const Slot& slot, Workers workers, uint32_t half, const T* in,
                           const Routes& routes, const Scales& scales) {
    const auto ranks = static_cast<uint32_t>(experts.window.world_size);
    const uint32_t num_routes = routes.num_rows * routes.top_k;
    const uint32_t lane = warp().index();
    bool failed = false;
    // Sends to the experts of all ranks in turn, from the rank after this one, so that all links
    // are busy.
    share(workers, experts.per_rank() * ranks, [&](uint32_t turn, uint32_t part, uint32_t parts) {
        const uint32_t owner = (experts.window.rank + 1 + turn) % ranks, own = turn / ranks;
        const uint32_t expert = experts.first_of(owner) + own;
        if (expert >= experts.first_of(owner + 1)) return;
        uint32_t count = 0;
        for (uint32_t first = 0; first < num_routes; first += platform::kWarpSize) {
            const uint32_t mine = first + lane;
            const int32_t chosen =
                mine < num_routes ? mem::load_plain(routes.experts + mine) : int32_t{-1};
            if (chosen >= 0 && is_outside(chosen, experts.num_experts)) {
                refuse(comm, kKcclDispatch, 0,
                       {kKcclArgumentExpert, static_cast<uint64_t>(chosen), experts.num_experts});
                failed = true;
            }
            const uint64_t found = platform::warp_ballot(chosen == static_cast<int32_t>(expert));
            if (found == 0) continue;
            for (uint32_t each = 0; each < platform::kWarpSize; ++each) {
                if ((found >> each & 1) == 0) continue;
                const uint32_t m = count++;
                if (m % parts != part || m >= experts.capacity) continue;
                const uint64_t row = (first + each) / routes.top_k;
                uint8_t* const to = areas.slot(owner, half, comm.rank, own, m);
                copy_by_warp(to, in + row * experts.columns, slot.row_bytes);
                if (scales.per_row > 0) {
                    copy_by_warp(to + slot.scales_at(), scales.in + row * scales.per_row,
                                 slot.scale_bytes);
                }
                if (lane == each) mem::store_plain(routes.slots + mine, static_cast<int32_t>(m));
            }
        }
        if (part != 0 || lane != 0) return;
        mem::store_plain(areas.count(owner, half, comm.rank, own), count);
        if (count > experts.capacity) {
            refuse_count(comm, experts, expert, count);
            failed = true;
        }
    });
    return failed;
}

// Copies this warp's part of the rows that have come to `out`. Called by all threads of a warp.
template <class T>
KCCL_DEVICE void take_rows(const Experts& experts, const Areas& areas, const Slot& slot,
                           Workers workers, uint32_t halves, T* out, uint32_t* counts,
                           const Scales& scales) {
    const int rank = experts.window.rank, ranks = experts.window.world_size;
    const auto half_of = [&](int source) { return halves >> source & 1; };
    const auto count_of = [&](uint32_t expert, int source) {
        return mem::load_plain(areas.count(rank, half_of(source), source, expert));
    };
    const uint64_t each_expert = experts.rows_per_expert();
    each_row(workers, experts, count_of,
             [&](uint32_t expert, int source, uint32_t m, uint32_t row) {
                 const uint8_t* const from = areas.slot(rank, half_of(source), source, expert, m);
                 const uint64_t to = expert * each_expert + row;
                 copy_by_warp(out + to * experts.columns, from, slot.row_bytes);
                 if (scales.per_row == 0) return;
                 copy_by_warp(scales.out + to * scales.per_row, from + slot.scales_at(),
                              slot.scale_bytes);
             });
    share(workers, experts.num_own(), [&](uint32_t expert, uint32_t part, uint32_t) {
        if (part != 0) return;
        for (int source = warp().index(); source < ranks; source += warp().size()) {
            mem::store_plain(counts + expert * ranks + source, count_of(expert, source));
        }
    });
}

template <class T>
KCCL_DEVICE Slot dispatch_slot(const Experts& experts, const Scales& scales) {
    return {experts.columns * sizeof(T), scales.per_row * sizeof(float)};
}

}  // namespace expert_rows

// Dispatches rows on an open channel. Called by all threads of its coop (a thread, warp or block:
// coop.cuh). On every rank the same coop must make the call.
//
// Sends row i of `in` to the experts routes.experts[i][...]; each gets its own copy. `in` is
// [num_rows][columns], and num_rows may differ between ranks. T is any type: rows are moved as they
// are. Scales travel with their rows.
//
// `out` is [own expert][rows_per_expert()][columns]. An expert's rows follow each other without
// gaps: those of rank 0, then those of rank 1; a rank's rows in the order of its routes. What lies
// behind them is not written. `counts` is [own expert][source]: how many rows each rank has sent to
// the expert. Stores in routes.slots what a combine needs.
//
// All arrays may be read and reused on return, by any thread of the coop. More rows of this rank
// for one expert than `capacity`, or an expert that does not exist, make the call fail on all
// ranks, and `out` is undefined.
template <class T, class Coop, int WORLD_SIZE>
KCCL_DEVICE Status dispatch(Channel<Coop, WORLD_SIZE>& channel, const Experts& experts, T* out,
                            uint32_t* counts, const T* in, const Routes& routes,
                            const Scales& scales = {}) {
    begin_together<kCoopKind<Coop>>(channel.comm(), "dispatch",
                                    {{"channel", static_cast<uint64_t>(channel.index())},
                                     {"out", out},
                                     {"counts", counts},
                                     {"in", in},
                                     {"num_rows", routes.num_rows}});
    const expert_rows::Slot slot = expert_rows::dispatch_slot<T>(experts, scales);
    const expert_rows::Areas areas(experts, slot);
    const Status begun = expert_rows::begin<T>(channel, kKcclDispatch, experts, slot, routes.top_k);
    if (begun != kKcclOk) return begun;
    return expert_rows::on_channel(
        channel, kKcclDispatch, areas,
        [&](expert_rows::Workers workers, uint32_t half) KCCL_INLINED {
            return expert_rows::send_rows(channel.comm(), experts, areas, slot, workers, half, in,
                                          routes, scales);
        },
        [&](expert_rows::Workers workers, uint32_t halves) KCCL_INLINED {
            expert_rows::take_rows(experts, areas, slot, workers, halves, out, counts, scales);
        });
}

// Opens the coop's own channel, makes this one call on it and closes it. Called by all threads of
// the coop.
template <class T, class Coop>
KCCL_DEVICE Status dispatch(Coop coop, const DeviceComm& comm, const Experts& experts, T* out,
                            uint32_t* counts, const T* in, const Routes& routes,
                            const Scales& scales = {}) {
    return on_one_channel(coop, comm, kOwnChannel, [&](Channel<Coop>& opened) KCCL_INLINED {
        return dispatch(opened, experts, out, counts, in, routes, scales);
    });
}

// Makes the same call by all blocks of the grid; every rank must have equally many. Called by all
// threads of all blocks. If other blocks wrote to the inputs, the caller must synchronise the
// blocks before. Any block may read all arrays on return.
template <class T>
KCCL_DEVICE Status dispatch(Grid, const DeviceComm& comm, const Experts& experts, T* out,
                            uint32_t* counts, const T* in, const Routes& routes,
                            const Scales& scales = {}) {
    begin_together<CoopKind::kGrid>(
        comm, "dispatch",
        {{"out", out}, {"counts", counts}, {"in", in}, {"num_rows", routes.num_rows}});
    const expert_rows::Slot slot = expert_rows::dispatch_slot<T>(experts, scales);
    const expert_rows::Areas areas(experts, slot);
    return expert_rows::by_grid(
        comm, kKcclDispatch, areas,
        [&](Channel<Block>& channel) KCCL_INLINED {
            return expert_rows::begin<T>(channel, kKcclDispatch, experts, slot, routes.top_k);
        },
        [&](expert_rows::Workers workers, uint32_t half) KCCL_INLINED {
            return expert_rows::send_rows(comm, experts, areas, slot, workers, half, in, routes,
                                          scales);
        },
        [&](expert_rows::Workers workers, uint32_t halves) KCCL_INLINED {
            expert_rows::take_rows(experts, areas, slot, workers, halves, out, counts, scales);
        });
}

}  // namespace kccl
