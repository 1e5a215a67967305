// Prefill: one launch fills the KV cache with the positions Task.start to Task.num_ids - 1 of a
// request, S::kChunk at a time. The decode kernel behind it does the rest, from the last id on: it
// has the head. The cache gets the same bits as from decode.
//
//     KCCL_KERNEL_OF(kPrefillThreads<S>) void prefill(DeviceComm comm, Task task) {
//         run_prefill<S>(comm, task);
//     }
//
// Launched on every rank, with S::kBlocks blocks of S::kChunkWarps + S::kChunkOthers warps, all
// resident, and sizeof(PrefillShared<S>) bytes of dynamic shared memory. Task.round counts the
// passes of all prefills before.
//
// A request that is given up ends behind the same pass on all ranks. The decode kernel ends it
// after one position more.
#pragma once

#include "prefill_rows.cuh"
#include "registers.cuh"

namespace kccl::decode {

template <class S>
constexpr uint32_t kPrefillThreads = (S::kChunkWarps + S::kChunkOthers) * platform::kWarpSize;

// ---- The crew -----------------------------------------------------------------------------------

// The crew's part of a pass.
template <class S>
struct CrewOfPass {
    using C = Chunk<S>;
    using V = Vector<S>;
    Crew<S>& crew;
    const Pass& pass;

    // Nobody reads what comes behind the last layer's keys and values.
    template <uint32_t OP>
    KCCL_DEVICE Walk run(uint32_t layer) {
        constexpr auto kOp = S::kLayer[OP];
        if (!crew.is_ready()) return Walk::kFailed;
        if constexpr (kOp.product == Product<S>::kNone) {
            turn_chunk(crew, pass, layer);
            if (layer + 1 == S::kNumLayers) return Walk::kIsOver;
            finish<OP>(layer, Step::kHalf);
            if (!crew.is_ready()) return Walk::kFailed;
            const auto* const rules = reinterpret_cast<const Layer*>(crew.task().layers) + layer;
            attend_chunk(crew, pass, layer, mem::load_plain(&rules->window));
            finish<OP>(layer, Step::kDone);
            return Walk::kGoesOn;
        } else {
            if constexpr (kOp.takes == V::kResidual) {
                make_scales(crew);
                finish<OP>(layer, Step::kHalf);
            }
            multiply_chunk<MatrixOf<S, kOp.product>>(crew, kOp.product, layer);
            crew.meet();
            prefetch_next<OP>(layer);
            if constexpr (kOp.gives == V::kResidual) {
                return add_to_residual<OP>(crew, pass, layer) ? Walk::kGoesOn : Walk::kFailed;
            } else {
                if (!crew.is_ready()) return Walk::kFailed;
                if constexpr (kOp.gives == V::kHeads) finish_qkv(crew, layer);
                if constexpr (kOp.gives == V::kActs) finish_acts(crew, layer);
                finish<OP>(layer, Step::kDone);
                return Walk::kGoesOn;
            }
        }
    }

  private:
    template <uint32_t OP>
    KCCL_DEVICE void finish(uint32_t layer, Step step) {
        crew.finish(C::number_of(pass.number, layer, OP, step), false);
    }
    template <uint32_t OP>
    KCCL_DEVICE void prefetch_next(uint32_t layer) {
        constexpr bool kIsLast = OP + 1 == S::kNumOps;
        constexpr Product<S> kNext = next_product<S>(kIsLast ? 0 : OP + 1);
        // In the last layer, only ops before attention get here.
        constexpr bool kEndsHere = S::kLayer[OP].gives == V::kHeads;
        if (kEndsHere && layer + 1 == S::kNumLayers) return;
        prefetch_weights<MatrixOf<S, kNext>>(crew, kNext, layer + (kIsLast ? 1 : 0));
    }
};

// False: the lookout has given up.
template <class S>
KCCL_DEVICE bool compute_pass(Crew<S>& crew, const Pass& pass) {
    if (!crew.is_ready()) return false;
    embed_chunk(crew, pass);
    crew.finish(Chunk<S>::embedded_in(pass.number), false);
    CrewOfPass<S> role = {crew, pass};
    for (uint32_t layer = 0; layer < S::kNumLayers; ++layer) {
        const Walk walk = walk_layer<S>(role, layer);
        if (walk == Walk::kFailed) return false;
        if (walk == Walk::kIsOver) break;
    }
    crew.look_at_host(pass.number);
    crew.finish(Chunk<S>::end_of(pass.number), true);
    return true;
}

// ---- The lookout --------------------------------------------------------------------------------

// As CrewOfPass.
template <class S>
struct LookoutOfPass {
    using C = Chunk<S>;
    using V = Vector<S>;
    Lookout<S>& lookout;
    uint32_t pass;

    template <uint32_t OP>
    KCCL_DEVICE Walk run(uint32_t layer) {
        constexpr auto kOp = S::kLayer[OP];
        lookout.await_group(C::template number_before<OP>(pass, layer));
        if constexpr (kOp.product == Product<S>::kNone) {
            if (!lookout.let_go()) return Walk::kFailed;
            if (layer + 1 == S::kNumLayers) return Walk::kIsOver;
            lookout.await_group(C::number_of(pass, layer, OP, Step::kHalf));
            if (!lookout.let_go()) return Walk::kFailed;
            return Walk::kGoesOn;
        } else if constexpr (kOp.takes == V::kResidual) {
            using M = MatrixOf<S, kOp.product>;
            if (!lookout.let_go()) return Walk::kFailed;
            const uint32_t before = lookout.group() * C::QkvPlan::kTiles * C::kStripe;
            lookout.template copy<M>(C::kNormed + before, M::tiles_of(lookout.member()).num);
            lookout.await_group(C::number_of(pass, layer, OP, Step::kHalf));
            return lookout.let_go() ? Walk::kGoesOn : Walk::kFailed;
        } else {
            return add_up<OP>(layer);
        }
    }

  private:
    // A module's last product.
    template <uint32_t OP>
    KCCL_DEVICE Walk add_up(uint32_t layer) {
        constexpr auto kOp = S::kLayer[OP];
        static_assert(kOp.gives == V::kResidual, "others take the residual");
        using M = MatrixOf<S, kOp.product>;
        constexpr uint32_t kPlace = kOp.takes == V::kAttended ? C::kAttended : C::kActs;
        const uint32_t module = S::kNumModules * layer + module_of_op<S>(OP);
        const Module rule = rule_of<S>(lookout.task(), module);
        if (receives<S>(rule)) {
            lookout.await_row(C::number_of_module(pass, static_cast<uint32_t>(rule.receives)));
        }
        if (!lookout.let_go()) return Walk::kFailed;
        const uint32_t before = lookout.first_lane_here() * ChunkPlan<S, M>::kTiles * C::kStripe;
        lookout.template copy<M>(kPlace + before, M::tiles_of(lookout.member()).num);
        if (!blocks<S>(rule)) return Walk::kGoesOn;
        lookout.await_row(C::number_of(pass, layer, OP, Step::kHalf));
        return lookout.let_go() ? Walk::kGoesOn : Walk::kFailed;
    }
};

// As compute_pass().
template <class S>
KCCL_DEVICE bool look_out(Lookout<S>& lookout, uint32_t pass) {
    // All places are written anew.
    lookout.await_all(Chunk<S>::end_of(pass - 1));
    if (!lookout.let_go(lookout.was_given_up(pass - 1))) return false;
    LookoutOfPass<S> role = {lookout, pass};
    for (uint32_t layer = 0; layer < S::kNumLayers; ++layer) {
        const Walk walk = walk_layer<S>(role, layer);
        if (walk == Walk::kFailed) return false;
        if (walk == Walk::kIsOver) break;
    }
    return true;
}

// ---- The kernel ---------------------------------------------------------------------------------

// How many passes a request has.
template <class S>
KCCL_DEVICE uint32_t num_passes(const Task& task) {
    return ceil_div(task.num_ids - task.start, S::kChunk);
}

// Calls run(pass) until it returns false.
template <class S, class Run>
KCCL_DEVICE void for_each_pass(const Task& task, Run run) {
    Pass pass = {task.round, task.start, 0};
    for (; pass.first < task.num_ids; ++pass.number, pass.first += S::kChunk) {
        const uint32_t left = task.num_ids - pass.first;
        pass.num = left < S::kChunk ? left : S::kChunk;
        if (!run(pass)) return;
    }
}

template <class S>
KCCL_DEVICE void run_prefill(const DeviceComm& comm, const Task& task) {
    auto& shared = *reinterpret_cast<PrefillShared<S>*>(platform::dynamic_shared());
    if (leads(block())) {
        shared.stops[0] = shared.stops[1] = kNoStop;
        init_meeting(shared.met, S::kChunkWarps);
        mem::init_copies(&shared.ready, 1);
    }
    init_ring(block(), shared.ring, S::kChunkWarps);
    const uint32_t warp_index = platform::thread_in_block() / platform::kWarpSize;
    if (warp_index < S::kChunkWarps) {
        take_share<S::kChunkWarps, S::kChunkOthers>(true);
        Crew<S> crew(comm, task, shared);
        for_each_pass<S>(task, [&](const Pass& pass) { return compute_pass(crew, pass); });
        // The next request counts all passes of this one.
        if (crew.is_given_up()) {
            crew.finish(Chunk<S>::end_of(task.round + num_passes<S>(task) - 1), true);
        }
        return;
    }
    take_share<S::kChunkWarps, S::kChunkOthers>(false);
    if (warp_index == S::kChunkWarps) {
        Lookout<S> lookout(comm, task, shared);
        for_each_pass<S>(task, [&](const Pass& pass) { return look_out(lookout, pass.number); });
        lookout.drain();
    }
}

}  // namespace kccl::decode
