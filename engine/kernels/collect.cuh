// Collects the messages of other lanes for the block's rows of the residual, in a warp of its own.
// A message is a module's output of one lane, which the other lanes add to their residuals some
// layers later. Because this warp leaves the sums of messages in shared memory, consumer warps
// neither wait for messages nor keep them in registers.
#pragma once

#include "residual.cuh"

namespace kccl::decode {

// Waits for the messages of a module from all lanes but those of the block's lane group, which
// begin with lane `first_lane`. Returns their sum for float4 `row` of the residual of a column,
// whose tag is `tag`, added in the order of the lanes. is_there: whether this thread wants one.
// is_over(): ends the wait (Waiter::await).
template <class S, class IsOver>
KCCL_DECODE Float4 collected(Waiter<S>& waiter, uint32_t module, uint32_t first_lane, uint32_t row,
                             uint32_t column, uint32_t tag, bool is_there, uint32_t token_step,
                             IsOver is_over) {
    // Only kAtOnce messages are loaded at a time, because the warp has few registers.
    constexpr uint32_t kAtOnce = 4;
    Float4 total = {};
    bool is_first = true;
#pragma unroll 1
    for (uint32_t first = 0; first < S::kNumLanes; first += kAtOnce) {
        uint32_t slots[kAtOnce], wanted = 0;
        Float4 float4s[kAtOnce];
        KCCL_UNROLL
        for (uint32_t i = 0; i < kAtOnce; ++i) {
            const uint32_t lane = first + i;
            const bool is_own = lane - first_lane < Shape<S>::kLanesPerGroup;
            const bool is_wanted = is_there && lane < S::kNumLanes && !is_own;
            wanted |= is_wanted ? 1u << i : 0;
            slots[i] =
                is_wanted ? Slots<S>::in_column(Slots<S>::message(module, lane) + row, column) : 0;
        }
        waiter.template await<ConsumerWarp<S>::kReach, true>(
            slots, wanted, tag, token_step, (1u << S::kWorldSize) - 1, float4s, is_over);
        KCCL_UNROLL
        for (uint32_t i = 0; i < kAtOnce; ++i) {
            if ((wanted >> i & 1u) == 0) continue;
            KCCL_UNROLL
            for (int j = 0; j < 4; ++j) {
                total.value[j] =
                    is_first ? float4s[i].value[j] : total.value[j] + float4s[i].value[j];
            }
            is_first = false;
        }
    }
    return total;
}

// Runs the collecting warp. For each module that receives messages, it waits for them and leaves
// their sums in shared.landed, from where the consumer warps add them (ConsumerWarp::await_landed).
// Returns when the consumer warps have ended. Called by all threads of the warp.
template <class S>
KCCL_DECODE void collect(const DeviceComm& comm, const Task& task, Shared<S>& shared) {
    if constexpr (S::kHasDelayed) {
        if (task.only_reads != 0) return;
        using Dims = Shape<S>;
        const uint32_t block = platform::block_in_grid();
        const uint32_t lane =
            Dims::first_lane_of(comm.rank) + Dims::lane_group_of(block) * Dims::kLanesPerGroup;
        const Cut tiles = Dims::Out::tiles_of(Dims::block_in_group_of(block));
        Waiter<S> waiter(comm, task, &shared.gave_up);
        Delays<S> delays(comm.rank);
        const auto is_over = [&] {
            return platform::warp_any(mem::has_completed_now(&shared.ended, 0));
        };
        uint32_t parity = 0;
        Uses uses = uses_of(task.uses);
        uint32_t num_columns = columns_of<S>(task, task.start), begun_parity = 0;
        // Waits until it is known how many columns the next token step has. Returns false if there
        // is none.
        const auto await_columns = [&] {
            if constexpr (S::kColumns > 1 && !S::kHasSeats) {
                while (platform::warp_any(!mem::has_completed_now(&shared.begun, begun_parity))) {
                    if (is_over()) return false;
                    mem::poll_pause();
                }
                begun_parity ^= 1u;
                num_columns = mem::load_plain(&shared.num_columns);
            }
            return true;
        };
        if (goes_on(task) && !await_columns()) return;
        for (uint32_t token_step = task.token_step;; ++token_step) {
            for (uint32_t module = 0; module < Dims::kModules; ++module) {
                const Layer& layer = shared.layers[module / S::kNumModules];
                const int32_t from =
                    mem::load_plain(&rule_of_module<S>(layer, module % S::kNumModules)->receives);
                if (from < 0) continue;
                // Waits until the consumer warps have read `landed`, so that it may be overwritten.
                // The first of these waits ends at once, because they have no sums to read yet. In
                // a kernel where nothing overlaps, waits until they ask for the sums.
                const uint32_t phase = S::kOverlaps ? parity ^ 1u : parity;
                while (platform::warp_any(!mem::has_completed_now(&shared.was_read, phase))) {
                    if (is_over()) return;
                    mem::poll_pause();
                }
                delays.wait();
#pragma unroll 1
                for (uint32_t first = 0; first < num_columns * tiles.num * kTileFloat4s;
                     first += platform::kWarpSize) {
                    uint32_t index4 = first + warp().index(), column = 0, tag = tag_of(token_step);
                    const bool is_there = index4 < num_columns * tiles.num * kTileFloat4s;
                    if constexpr (S::kColumns > 1) {
                        column = is_there ? index4 / (tiles.num * kTileFloat4s) : 0;
                        index4 -= column * tiles.num * kTileFloat4s;
                        tag = (uses.low >> column & 1u) ^ 1u;
                    }
                    const Float4 sum = collected<S>(waiter, static_cast<uint32_t>(from), lane,
                                                    tiles.first * kTileFloat4s + index4, column,
                                                    tag, is_there, token_step, is_over);
                    if (!is_there) continue;
                    mem::store_plain(&shared.landed[column * kMostOfResidual<S> + index4], sum);
                }
                warp().sync();
                if (leads(warp())) {
                    if (waiter.has_failed()) mem::store_plain(&shared.landed_failed, 1u);
                    mem::arrive(&shared.has_landed);
                }
                parity ^= 1u;
            }
            if constexpr (S::kColumns > 1) count_step(&uses, num_columns);
            if (!await_columns()) return;
        }
    }
}

}  // namespace kccl::decode
