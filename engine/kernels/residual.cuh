// How a module adds to the residual: what the ops out and down have in common. program.py has the
// rule; a block finishes the same rows of the residual in every module.
#pragma once

#include "vectors.cuh"

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

// Adds up quads from the first lane to the last; those of the group's own lanes, which begin with
// lane `first`, are in `own`, and are left out if leaves_own.
template <class S>
KCCL_DEVICE Quad add_lanes(const Quad (&quads)[S::kNumLanes],
                           const Quad (&own)[Shape<S>::kGroupLanes], uint32_t first,
                           bool leaves_own) {
    Quad total = {};
    bool is_first = true;
    KCCL_UNROLL
    for (uint32_t lane = 0; lane < S::kNumLanes; ++lane) {
        const bool is_own = lane - first < Shape<S>::kGroupLanes;
        Quad part = quads[lane];
        KCCL_UNROLL
        for (uint32_t i = 0; i < Shape<S>::kGroupLanes; ++i) {
            if (lane == first + i) part = own[i];
        }
        if (is_own && leaves_own) continue;
        KCCL_UNROLL
        for (int i = 0; i < 4; ++i) {
            total.value[i] = is_first ? part.value[i] : total.value[i] + part.value[i];
        }
        is_first = false;
    }
    return total;
}

// Adds up, from the first lane to the last, what the lanes of other groups and ranks have sent for
// a quad of the residual, and what the group's own lanes have in `own`, unless leaves_own.
template <class S>
KCCL_DEVICE Quad sum_of_lanes(Worker<S>& worker, uint32_t module, uint32_t row, bool is_there,
                              const Quad (&own)[Shape<S>::kGroupLanes], bool leaves_own) {
    Quad quads[S::kNumLanes];
    uint32_t places[S::kNumLanes], wanted = 0;
    const uint32_t first = worker.first_lane();
    KCCL_UNROLL
    for (uint32_t lane = 0; lane < S::kNumLanes; ++lane) {
        const bool is_own = lane - first < Shape<S>::kGroupLanes;
        wanted |= is_there && !is_own ? 1u << lane : 0;
        places[lane] = Places<S>::message(module, lane) + row;
    }
    constexpr bool kAreAllOwn = S::kNumLanes == Shape<S>::kGroupLanes;
    if (!kAreAllOwn)
        worker.template await<Worker<S>::kReach>(places, wanted, tag_of(worker.round()), quads,
                                                 (1u << S::kWorldSize) - 1);
    return add_lanes<S>(quads, own, first, leaves_own);
}

// What is added to the residual besides the module's own output, for this thread's quads: the
// messages that land here. Called by all warps that multiply, before they wait for the vector: they
// have time then.
template <class S>
struct Landed {
    Quad quads[Shape<S>::kOwnQuads];
};

template <class S>
KCCL_DEVICE Landed<S> messages_for(Worker<S>& worker, const Module& rule) {
    Landed<S> landed = {};
    if (!S::kHasDelayed || rule.receives < 0) return landed;
    const Cut tiles = Shape<S>::Out::tiles_of(worker.member());
    const Quad none[Shape<S>::kGroupLanes] = {};
    KCCL_UNROLL
    for (uint32_t k = 0; k < Shape<S>::kOwnQuads; ++k) {
        const uint32_t quad = own_quad(worker, k);
        const bool is_there = quad < tiles.num * kTileQuads;
        landed.quads[k] = sum_of_lanes(worker, rule.receives, tiles.first * kTileQuads + quad,
                                       is_there, none, true);
    }
    return landed;
}

// Asks for these messages, which the cache may have lost since they came. Called one op earlier.
template <class S>
KCCL_DEVICE void prefetch_messages(Worker<S>& worker, const Module& rule) {
    if (!S::kHasDelayed || rule.receives < 0) return;
    const Cut tiles = Shape<S>::Out::tiles_of(worker.member());
    const uint32_t quad = own_quad(worker, 0);
    if (quad >= tiles.num * kTileQuads) return;
    KCCL_UNROLL
    for (uint32_t lane = 0; lane < S::kNumLanes; ++lane) {
        const uint32_t place = Places<S>::message(rule.receives, lane);
        mem::prefetch(worker.on_board(worker.comm().rank, place + tiles.first * kTileQuads + quad));
    }
}

// Adds what the warps' areas hold of module `module` to the residual, and publishes it. `is_last`:
// it is the last module, whose residual all ranks need. Called by all warps that multiply, when
// they have met.
template <class S>
KCCL_DEVICE void add_to_residual(Worker<S>& worker, uint32_t module, const Module& rule,
                                 const Landed<S>& landed, bool is_last) {
    // The rows of Out and Down are cut in the same way.
    constexpr uint32_t kLanes = Shape<S>::kGroupLanes;
    constexpr bool kHasOthers = S::kNumLanes > kLanes;
    const Cut tiles = Shape<S>::Out::tiles_of(worker.member());
    const bool is_blocking = S::kHasBlocking && rule.is_blocking != 0;
    const bool sends = kHasOthers && (is_blocking || rule.sends != 0);
    KCCL_UNROLL
    for (uint32_t k = 0; k < Shape<S>::kOwnQuads; ++k) {
        const uint32_t quad = own_quad(worker, k);
        const bool is_there = quad < tiles.num * kTileQuads;
        const uint32_t row = tiles.first * kTileQuads + quad;
        Quad own[kLanes], sent[kLanes];
        KCCL_UNROLL
        for (uint32_t lane = 0; lane < kLanes; ++lane) {
            own[lane] = Quad{};
            if (is_there) {
                own[lane] = total_of(worker, quad / kTileQuads * kLanes + lane, quad % kTileQuads);
            }
            sent[lane] = as_message<S>(own[lane]);
        }
        const auto send = [&] {
            if (!sends || !is_there) return;
            KCCL_UNROLL
            for (uint32_t lane = 0; lane < kLanes; ++lane) {
                worker.publish_to_all(Places<S>::message(module, worker.first_lane() + lane) + row,
                                      sent[lane], tag_of(worker.round()));
            }
        };
        Quad& x = worker.residual[k];
        if (is_blocking) {
            send();
            const Quad total = sum_of_lanes(worker, module, row, is_there, sent, false);
            KCCL_UNROLL
            for (int i = 0; i < 4; ++i) x.value[i] += total.value[i];
        } else {
            KCCL_UNROLL
            for (int i = 0; i < 4; ++i) x.value[i] += rule.own_scale * own[0].value[i];
            if (rule.receives >= 0) {
                KCCL_UNROLL
                for (int i = 0; i < 4; ++i) x.value[i] += landed.quads[k].value[i];
            }
        }
        if (is_there) {
            const uint32_t place = Places<S>::residual(module, worker.residual_index()) + row;
            if (is_last && S::kNumResiduals > 1) {
                worker.publish_to_all(place, x, tag_of(worker.round()));
            } else {
                worker.publish(place, x);
            }
        }
        // The others need the messages later than this lane needs its residual.
        if (!is_blocking) send();
    }
    worker.end_op();
}

}  // namespace kccl::decode
