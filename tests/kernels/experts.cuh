// Layers of experts, several in one launch: between them nothing orders memory but the calls
// themselves. Expert e multiplies its rows by e + 1.
#pragma once

#include <kccl/kccl.cuh>

namespace kccl {

// What a kernel works on. Arrays have a part for each round.
template <class T>
struct Layers {
    uint32_t rounds, most_rows, top_k, per_row;
    const uint32_t* num_rows;
    const T* x;
    const int32_t* chosen;
    const float* weights;
    const float* scales;
    T* rows;
    float* row_scales;
    uint32_t* counts;
    int32_t* slots;
    T* results;  // the same in all rounds
    T* out;
};

// Calls on channels that are opened for them.
template <class Coop>
struct ByCoop {
    const DeviceComm& comm;

    template <class... Arguments>
    KCCL_DEVICE Status dispatch(Arguments... each) const {
        return kccl::dispatch(Coop(), comm, each...);
    }
    template <class... Arguments>
    KCCL_DEVICE Status combine(Arguments... each) const {
        return kccl::combine(Coop(), comm, each...);
    }
    KCCL_DEVICE void sync() const { Coop().sync(); }
};

struct ByGrid {
    const DeviceComm& comm;

    template <class... Arguments>
    KCCL_DEVICE Status dispatch(Arguments... each) const {
        return kccl::dispatch(grid(), comm, each...);
    }
    template <class... Arguments>
    KCCL_DEVICE Status combine(Arguments... each) const {
        return kccl::combine(grid(), comm, each...);
    }
    KCCL_DEVICE void sync() const { grid_sync(comm); }
};

// Calls on an open channel. Between a dispatch and its combine comes a call that does not wait for
// its peers.
struct OnChannel {
    Channel<Block>& channel;

    template <class... Arguments>
    KCCL_DEVICE Status dispatch(Arguments... each) {
        return kccl::dispatch(channel, each...);
    }
    template <class... Arguments>
    KCCL_DEVICE Status combine(Arguments... each) {
        uint32_t word = 0;
        broadcast_direct_ll16(channel, reinterpret_cast<uint8_t*>(&word),
                              reinterpret_cast<const uint8_t*>(&word), sizeof(word), 0);
        return kccl::combine(channel, each...);
    }
    KCCL_DEVICE void sync() const { channel.coop().sync(); }
};

// Called by all threads of the coop; this is thread `index` of `size`.
template <class T, class Calls>
KCCL_DEVICE void make_layers(const Experts& experts, const Layers<T>& all, uint32_t index,
                             uint32_t size, Calls calls) {
    const uint64_t num_out = experts.num_own() * experts.rows_per_expert();
    const uint32_t ranks = experts.window.world_size, num_own = experts.num_own();
    for (uint32_t round = 0; round < all.rounds; ++round) {
        const uint64_t first = uint64_t{round} * all.most_rows;
        const Routes routes = {all.chosen + first * all.top_k, all.slots + first * all.top_k,
                               all.num_rows[round], all.top_k};
        T* const rows = all.rows + round * num_out * experts.columns;
        uint32_t* const counts = all.counts + round * num_own * ranks;
        const Scales scales = {all.row_scales + round * num_out * all.per_row,
                               all.scales + first * all.per_row, all.per_row};
        const T* const x = all.x + first * experts.columns;
        if (calls.dispatch(experts, rows, counts, x, routes, scales) != kKcclOk) return;
        for (uint32_t expert = 0; expert < num_own; ++expert) {
            uint64_t num = 0;
            for (uint32_t source = 0; source < ranks; ++source)
                num += counts[expert * ranks + source];
            const float factor = experts.first_of(experts.window.rank) + expert + 1.0f;
            const uint64_t at = expert * experts.rows_per_expert() * experts.columns;
            for (uint64_t i = index; i < num * experts.columns; i += size) {
                const float value = Element<T>::widen(rows[at + i]);
                all.results[at + i] = Element<T>::narrow(mem::product(value, factor));
            }
        }
        calls.sync();
        T* const out = all.out + first * experts.columns;
        const T* const results = all.results;
        const uint32_t* const these = counts;
        const float* const weights = all.weights + first * all.top_k;
        if (calls.combine(experts, out, results, these, routes, weights) != kKcclOk) return;
    }
}

enum class By { kChannel, kBlock, kWarp, kGrid };

template <class T, By BY>
KCCL_KERNEL_OF(256)
void layers_of_experts(DeviceComm comm, Window window, uint32_t num_experts, uint32_t capacity,
                       uint32_t columns, uint32_t rounds, uint32_t most_rows, uint32_t top_k,
                       uint32_t per_row, const uint32_t* num_rows, const T* x,
                       const int32_t* chosen, const float* weights, const float* scales, T* rows,
                       float* row_scales, uint32_t* counts, int32_t* slots, T* results, T* out) {
    const Experts experts = {window, num_experts, capacity, columns};
    const Layers<T> all = {rounds,     most_rows, top_k,   per_row, num_rows,
                           x,          chosen,    weights, scales,  rows,
                           row_scales, counts,    slots,   results, out};
    const uint32_t index = block().index(), size = block().size();
    if constexpr (BY == By::kGrid) {
        make_layers(experts, all, platform::block_in_grid() * size + index,
                    platform::blocks_per_grid() * size, ByGrid{comm});
    } else if constexpr (BY == By::kWarp) {
        make_layers(experts, all, index, size, ByCoop<Warp>{comm});
    } else if constexpr (BY == By::kBlock) {
        make_layers(experts, all, index, size, ByCoop<Block>{comm});
    } else {
        Channel<Block> channel(block(), comm);
        make_layers(experts, all, index, size, OnChannel{channel});
    }
}

}  // namespace kccl
