// Adds a module's output to the residual: the code that the ops out and down share. program.py has
// the rule. A block finishes the same rows of the residual in every module.
#pragma once

#include "expert_biases.cuh"

namespace kccl::decode {

// Returns a value of a module's output as other lanes get it.
template <class S>
KCCL_DECODE float as_message(float value) {
    return S::kRoundsMessages ? Element<bf16>::widen(Element<bf16>::narrow(value))
                              : untagged(value);
}
template <class S>
KCCL_DECODE Float4 as_message(const Float4& four) {
    Float4 sent;
    KCCL_UNROLL
    for (int i = 0; i < 4; ++i) sent.value[i] = as_message<S>(four.value[i]);
    return sent;
}

// The most float4s of the residual that a block has.
template <class S>
constexpr uint32_t kMostOfResidual = Shape<S>::Out::kMostTiles * kTileFloat4s;

// Returns a float4 of the block's rows for one lane, summed over all warps. lane: counted in the
// lane group.
template <class S>
KCCL_DECODE Float4 own_total(ConsumerWarp<S>& consumer, const OwnRows& rows, uint32_t lane) {
    return total_of(consumer, rows.index4 / kTileFloat4s * Shape<S>::kLanesPerGroup + lane,
                    rows.index4 % kTileFloat4s, rows.column);
}

// Adds a lane's part to *total, the sum over the lanes before it. The first lane's part replaces
// *total.
KCCL_DECODE void add_lane(Float4* total, const Float4& part, bool is_first) {
    KCCL_UNROLL
    for (int i = 0; i < 4; ++i) {
        total->value[i] = is_first ? part.value[i] : total->value[i] + part.value[i];
    }
}

// Returns the sum of all lanes' messages (outputs) of a module, from the first lane to the last,
// for this thread's k-th float4 (own_rows) of the block's rows. Called where all lanes belong to
// this block's lane group, so that no other block is asked. `num`: how many float4s of a column the
// block has. Called by all threads of the warp.
template <class S>
KCCL_DECODE Float4 sum_here(ConsumerWarp<S>& consumer, uint32_t k, uint32_t num) {
    // kSharers neighbouring threads share a float4. Each of them has one lane.
    constexpr uint32_t kSharers = [] {
        uint32_t n = 1;
        while (n < S::kNumLanes) n *= 2;
        return n;
    }();
    constexpr uint32_t kAtOnce = platform::kWarpSize / kSharers;
    const uint32_t thread = consumer.thread();
    const uint32_t lane = thread % kSharers, first_sharer = thread - lane;
    Float4 mine = {};
#pragma unroll 1
    for (uint32_t first = 0; first < platform::kWarpSize; first += kAtOnce) {
        const uint32_t before = k * platform::kWarpSize + first;
        const uint32_t end = S::kColumns == 1 ? num : consumer.num_columns() * kMostOfResidual<S>;
        if (float4_of_warp(consumer, before) >= end) break;
        const OwnRows rows = rows_at<kMostOfResidual<S>>(
            consumer, float4_of_warp(consumer, before + thread / kSharers));
        Float4 part = {};
        if (has_rows(consumer, rows, num) && lane < S::kNumLanes) {
            part = as_message<S>(own_total(consumer, rows, lane));
        }
        Float4 total = {};
        KCCL_UNROLL
        for (uint32_t each = 0; each < S::kNumLanes; ++each) {
            add_lane(&total, platform::shuffle(part, first_sharer + each), each == 0);
        }
        const uint32_t offset = thread - first;
        total = platform::shuffle(total, offset % kAtOnce * kSharers);
        if (offset < kAtOnce) mine = total;
    }
    return mine;
}

// Returns the sum of all lanes' messages (outputs) of a module for a float4, where other ranks or
// lane groups have lanes as well. Sends the messages of this block's lanes to all ranks, and waits
// for those of other lanes. rows, row: the float4 among the block's rows, and its number in the
// residual. is_there: whether the thread has such a float4.
template <class S>
KCCL_DECODE Float4 sum_over_ranks(ConsumerWarp<S>& consumer, uint32_t module, const OwnRows& rows,
                                  uint32_t row, bool is_there) {
    constexpr uint32_t kLanes = Shape<S>::kLanesPerGroup;
    const uint32_t first = consumer.first_lane(), tag = consumer.tag(rows.column);
    Float4 own[kLanes];
    KCCL_UNROLL
    for (uint32_t i = 0; i < kLanes; ++i) {
        own[i] = Float4{};
        if (!is_there) continue;
        own[i] = as_message<S>(own_total(consumer, rows, i));
        consumer.publish_to_all(
            Slots<S>::in_column(Slots<S>::message(module, first + i) + row, rows.column), own[i],
            tag);
    }
    Float4 float4s[S::kNumLanes];
    uint32_t slots[S::kNumLanes], wanted = 0;
    KCCL_UNROLL
    for (uint32_t lane = 0; lane < S::kNumLanes; ++lane) {
        wanted |= is_there && lane - first >= kLanes ? 1u << lane : 0;
        slots[lane] = Slots<S>::in_column(Slots<S>::message(module, lane) + row, rows.column);
    }
    consumer.template await<ConsumerWarp<S>::kReach>(slots, wanted, tag, float4s,
                                                     (1u << S::kWorldSize) - 1);
    Float4 total = {};
    KCCL_UNROLL
    for (uint32_t lane = 0; lane < S::kNumLanes; ++lane) {
        Float4 part = float4s[lane];
        KCCL_UNROLL
        for (uint32_t i = 0; i < kLanes; ++i) {
            if (lane == first + i) part = own[i];
        }
        add_lane(&total, part, lane == 0);
    }
    return total;
}

// Adds the sums of module `module`, which lie in the warps' areas, to the residual, and publishes
// the residual. Called by all consumer warps, when they have met after the product. `is_last`: it
// is the last module. All ranks need its residual if the head takes the mean. If the module
// receives messages of an earlier one, the collecting warp has added them up (collect.cuh).
template <class S>
KCCL_DECODE void add_to_residual(ConsumerWarp<S>& consumer, uint32_t module, const Module& rule,
                                 bool is_last) {
    constexpr bool kHasOthers = S::kNumLanes > Shape<S>::kLanesPerGroup;
    // The rows of Out and Down are cut in the same way, so this is right for both.
    const Cut tiles = Shape<S>::Out::tiles_of(consumer.block_in_group());
    const bool is_blocking = S::kHasBlocking && rule.is_blocking != 0;
    const bool receives = S::kHasDelayed && rule.receives >= 0;
    if (receives) consumer.await_landed();
    KCCL_UNROLL
    for (uint32_t k = 0; k < Shape<S>::kOwnFloat4s; ++k) {
        const OwnRows rows = own_rows<kMostOfResidual<S>>(consumer, k);
        const bool is_there = has_rows(consumer, rows, tiles.num * kTileFloat4s);
        const uint32_t row = tiles.first * kTileFloat4s + rows.index4;
        Float4& x = consumer.residual[k];
        Float4 own = {};
        if (is_blocking) {
            Float4 total;
            if constexpr (kHasOthers) {
                total = sum_over_ranks(consumer, module, rows, row, is_there);
            } else {
                total = sum_here(consumer, k, tiles.num * kTileFloat4s);
            }
            if (is_there) total = plus_module_biases<S>(consumer, module, row, total);
            KCCL_UNROLL
            for (int i = 0; i < 4; ++i) x.value[i] += total.value[i];
        } else if (is_there) {
            own = own_total(consumer, rows, 0);
            KCCL_UNROLL
            for (int i = 0; i < 4; ++i) x.value[i] += rule.own_scale * own.value[i];
            if (receives) {
                const Float4 landed = mem::load_plain(
                    &consumer.shared().landed[rows.column * kMostOfResidual<S> + rows.index4]);
                KCCL_UNROLL
                for (int i = 0; i < 4; ++i) x.value[i] += landed.value[i];
            }
        }
        if (!is_there) continue;
        const uint32_t slot = Slots<S>::residual(module, consumer.residual_index()) + row;
        const uint32_t tag = consumer.tag(rows.column);
        if (is_last && S::kNumResiduals > S::kNumHeadParts) {
            consumer.publish_to_all(Slots<S>::in_column(slot, rows.column), x, tag);
        } else {
            consumer.publish(slot, x, rows.column);
        }
        // The message comes after the residual, because other lanes need it later than this lane
        // needs its residual.
        if (kHasOthers && !is_blocking && rule.sends != 0) {
            const uint32_t sent = Slots<S>::message(module, consumer.first_lane()) + row;
            consumer.publish_to_all(Slots<S>::in_column(sent, rows.column), as_message<S>(own),
                                    tag);
        }
    }
    if (receives) consumer.let_landed_go();
    consumer.end_op();
}

}  // namespace kccl::decode
