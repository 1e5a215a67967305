// How a module adds to the residual: what the ops out and down have in common. program.py has the
// rule; a block finishes the same rows of the residual in every module.
#pragma once

#include "biases.cuh"

namespace kccl::decode {

template <class S>
KCCL_DEVICE Quad as_message(const Quad& quad) {
    Quad sent;
    KCCL_UNROLL
    for (int i = 0; i < 4; ++i) {
        sent.value[i] = S::kRoundsMessages
                            ? Element<bf16>::widen(Element<bf16>::narrow(quad.value[i]))
                            : untagged(quad.value[i]);
    }
    return sent;
}

// The sums of the warps for a quad of the block's rows, of one of the group's lanes.
template <class S>
KCCL_DEVICE Quad own_total(Worker<S>& worker, uint32_t quad, uint32_t lane) {
    return total_of(worker, quad / kTileQuads * Shape<S>::kGroupLanes + lane, quad % kTileQuads);
}

// Adds a lane's part to those of the lanes before.
KCCL_DEVICE void add_lane(Quad* total, const Quad& part, bool is_first) {
    KCCL_UNROLL
    for (int i = 0; i < 4; ++i) {
        total->value[i] = is_first ? part.value[i] : total->value[i] + part.value[i];
    }
}

// The sum of all lanes' messages of a module for this thread's k-th quad (own_quad) of the block's
// rows, from the first lane to the last. All lanes are this block's. `num`: quads of the block.
// Called by all threads of the warp.
template <class S>
KCCL_DEVICE Quad sum_here(Worker<S>& worker, uint32_t k, uint32_t num) {
    // So many neighbouring threads share a quad: a lane each.
    constexpr uint32_t kSharers = [] {
        uint32_t n = 1;
        while (n < S::kNumLanes) n *= 2;
        return n;
    }();
    constexpr uint32_t kAtOnce = platform::kWarpSize / kSharers;
    const uint32_t thread = worker.thread();
    const uint32_t lane = thread % kSharers, first_sharer = thread - lane;
    Quad mine = {};
#pragma unroll 1
    for (uint32_t first = 0; first < platform::kWarpSize; first += kAtOnce) {
        const uint32_t before = k * platform::kWarpSize + first;
        if (before * S::kWarps + worker.warp_index() >= num) break;
        const uint32_t quad = (before + thread / kSharers) * S::kWarps + worker.warp_index();
        Quad part = {};
        if (quad < num && lane < S::kNumLanes) {
            part = as_message<S>(own_total(worker, quad, lane));
        }
        Quad total = {};
        KCCL_UNROLL
        for (uint32_t each = 0; each < S::kNumLanes; ++each) {
            add_lane(&total, platform::shuffle(part, first_sharer + each), each == 0);
        }
        const uint32_t place = thread - first;
        total = platform::shuffle(total, place % kAtOnce * kSharers);
        if (place < kAtOnce) mine = total;
    }
    return mine;
}

// The sum over the lanes where other ranks have lanes as well. Sends them this block's.
template <class S>
KCCL_DEVICE Quad sum_over_ranks(Worker<S>& worker, uint32_t module, uint32_t quad, uint32_t row,
                                bool is_there) {
    constexpr uint32_t kLanes = Shape<S>::kGroupLanes;
    const uint32_t first = worker.first_lane(), tag = tag_of(worker.round());
    Quad own[kLanes];
    KCCL_UNROLL
    for (uint32_t i = 0; i < kLanes; ++i) {
        own[i] = Quad{};
        if (!is_there) continue;
        own[i] = as_message<S>(own_total(worker, quad, i));
        worker.publish_to_all(Places<S>::message(module, first + i) + row, own[i], tag);
    }
    Quad quads[S::kNumLanes];
    uint32_t places[S::kNumLanes], wanted = 0;
    KCCL_UNROLL
    for (uint32_t lane = 0; lane < S::kNumLanes; ++lane) {
        wanted |= is_there && lane - first >= kLanes ? 1u << lane : 0;
        places[lane] = Places<S>::message(module, lane) + row;
    }
    worker.template await<Worker<S>::kReach>(places, wanted, tag, quads, (1u << S::kWorldSize) - 1);
    Quad total = {};
    KCCL_UNROLL
    for (uint32_t lane = 0; lane < S::kNumLanes; ++lane) {
        Quad part = quads[lane];
        KCCL_UNROLL
        for (uint32_t i = 0; i < kLanes; ++i) {
            if (lane == first + i) part = own[i];
        }
        add_lane(&total, part, lane == 0);
    }
    return total;
}

// Adds what the warps' areas hold of module `module` to the residual, and publishes it. `is_last`:
// it is the last module, whose residual all ranks need if the head takes the mean. Called by all
// warps that multiply, when they have met. What other lanes' messages add has been collected
// (collect.cuh).
template <class S>
KCCL_DEVICE void add_to_residual(Worker<S>& worker, uint32_t module, const Module& rule,
                                 bool is_last) {
    // The rows of Out and Down are cut in the same way.
    constexpr bool kHasOthers = S::kNumLanes > Shape<S>::kGroupLanes;
    const Cut tiles = Shape<S>::Out::tiles_of(worker.member());
    const bool is_blocking = S::kHasBlocking && rule.is_blocking != 0;
    const bool receives = S::kHasDelayed && rule.receives >= 0;
    if (receives) worker.await_landed();
    KCCL_UNROLL
    for (uint32_t k = 0; k < Shape<S>::kOwnQuads; ++k) {
        const uint32_t quad = own_quad(worker, k);
        const bool is_there = quad < tiles.num * kTileQuads;
        const uint32_t row = tiles.first * kTileQuads + quad;
        Quad& x = worker.residual[k];
        Quad own = {};
        if (is_blocking) {
            Quad total;
            if constexpr (kHasOthers) {
                total = sum_over_ranks(worker, module, quad, row, is_there);
            } else {
                total = sum_here(worker, k, tiles.num * kTileQuads);
            }
            if (is_there) total = plus_biases<S>(worker.task(), module, row, total);
            KCCL_UNROLL
            for (int i = 0; i < 4; ++i) x.value[i] += total.value[i];
        } else if (is_there) {
            own = own_total(worker, quad, 0);
            KCCL_UNROLL
            for (int i = 0; i < 4; ++i) x.value[i] += rule.own_scale * own.value[i];
            if (receives) {
                const Quad landed = mem::load_plain(&worker.shared().landed[quad]);
                KCCL_UNROLL
                for (int i = 0; i < 4; ++i) x.value[i] += landed.value[i];
            }
        }
        if (!is_there) continue;
        const uint32_t place = Places<S>::residual(module, worker.residual_index()) + row;
        const uint32_t tag = tag_of(worker.round());
        if (is_last && S::kNumResiduals > S::kNumHeadParts) {
            worker.publish_to_all(place, x, tag);
        } else {
            worker.publish(place, x);
        }
        // The others need the message later than this lane needs its residual.
        if (kHasOthers && !is_blocking && rule.sends != 0) {
            worker.publish_to_all(Places<S>::message(module, worker.first_lane()) + row,
                                  as_message<S>(own), tag);
        }
    }
    if (receives) worker.let_landed_go();
    worker.end_op();
}

}  // namespace kccl::decode
