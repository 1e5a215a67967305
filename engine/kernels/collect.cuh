// The warp that collects what other lanes have sent for the block's rows of the residual. They come
// long before they are added. So the warps that multiply need not wait for them, nor keep them in
// registers.
#pragma once

#include "worker.cuh"

namespace kccl::decode {

// The quad at `row` of what all lanes but the block's have sent of a module, added up from the
// first lane to the last.
template <class S, class IsOver>
KCCL_DEVICE Quad collected(Waiter<S>& waiter, uint32_t module, uint32_t first_lane, uint32_t row,
                           bool is_there, uint32_t round, IsOver is_over) {
    // Few at once, because the warp has few registers.
    constexpr uint32_t kAtOnce = 4;
    Quad total = {};
    bool is_first = true;
#pragma unroll 1
    for (uint32_t first = 0; first < S::kNumLanes; first += kAtOnce) {
        uint32_t places[kAtOnce], wanted = 0;
        Quad quads[kAtOnce];
        KCCL_UNROLL
        for (uint32_t i = 0; i < kAtOnce; ++i) {
            const uint32_t lane = first + i;
            const bool is_own = lane - first_lane < Shape<S>::kGroupLanes;
            const bool is_wanted = is_there && lane < S::kNumLanes && !is_own;
            wanted |= is_wanted ? 1u << i : 0;
            places[i] = is_wanted ? Places<S>::message(module, lane) + row : 0;
        }
        waiter.template await<Worker<S>::kReach>(places, wanted, tag_of(round), round,
                                                 (1u << S::kWorldSize) - 1, quads, is_over);
        KCCL_UNROLL
        for (uint32_t i = 0; i < kAtOnce; ++i) {
            if ((wanted >> i & 1u) == 0) continue;
            KCCL_UNROLL
            for (int j = 0; j < 4; ++j) {
                total.value[j] = is_first ? quads[i].value[j] : total.value[j] + quads[i].value[j];
            }
            is_first = false;
        }
    }
    return total;
}

// Returns when the warps that multiply have ended. Called by all threads of the warp.
template <class S>
KCCL_DEVICE void collect(const DeviceComm& comm, const Task& task, Shared<S>& shared) {
    if constexpr (S::kHasDelayed) {
        if (task.only_reads != 0) return;
        using Dims = Shape<S>;
        const uint32_t block = platform::block_in_grid();
        const uint32_t lane =
            Dims::first_lane_of(comm.rank) + Dims::group_of(block) * Dims::kGroupLanes;
        const Cut tiles = Dims::Out::tiles_of(Dims::member_of(block));
        Waiter<S> waiter(comm, task, &shared.gave_up);
        Delays<S> delays(comm.rank);
        const auto is_over = [&] {
            return platform::warp_any(mem::has_completed_now(&shared.ended, 0));
        };
        uint32_t parity = 0;
        for (uint32_t round = task.round;; ++round) {
            for (uint32_t module = 0; module < Dims::kModules; ++module) {
                const Layer& layer = shared.layers[module / 2];
                const int32_t from = mem::load_plain(module % 2 == 0 ? &layer.attention.receives
                                                                     : &layer.mlp.receives);
                if (from < 0) continue;
                // Before the first time there is nothing to be read.
                const uint32_t phase = S::kOverlaps ? parity ^ 1u : parity;
                while (platform::warp_any(!mem::has_completed_now(&shared.was_read, phase))) {
                    if (is_over()) return;
                    mem::poll_pause();
                }
                delays.wait();
#pragma unroll 1
                for (uint32_t first = 0; first < tiles.num * kTileQuads;
                     first += platform::kWarpSize) {
                    const uint32_t quad = first + warp().index();
                    const bool is_there = quad < tiles.num * kTileQuads;
                    const Quad sum =
                        collected<S>(waiter, static_cast<uint32_t>(from), lane,
                                     tiles.first * kTileQuads + quad, is_there, round, is_over);
                    if (is_there) mem::store_plain(&shared.landed[quad], sum);
                }
                warp().sync();
                if (leads(warp())) {
                    if (waiter.has_failed()) mem::store_plain(&shared.landed_failed, 1u);
                    mem::arrive(&shared.has_landed);
                }
                parity ^= 1u;
            }
        }
    }
}

}  // namespace kccl::decode
