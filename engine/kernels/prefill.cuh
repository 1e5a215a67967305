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

// The crew's part of a pass. False: the lookout has given up.
template <class S>
KCCL_DEVICE bool compute_pass(Crew<S>& crew, const Pass& pass) {
    using Dims = Shape<S>;
    const auto number_of = [&](uint32_t layer, Step step) {
        return Chunk<S>::number_of(pass.number, layer, step);
    };
    if (!crew.is_ready()) return false;
    embed_chunk(crew, pass);
    crew.finish(number_of(0, Step::kEmbedded), false);
    for (uint32_t layer = 0; layer < S::kNumLayers; ++layer) {
        if (!crew.is_ready()) return false;
        make_scales(crew);
        crew.finish(number_of(layer, Step::kAttentionScale), false);
        multiply_chunk<typename Dims::Qkv>(crew, Product<S>::kQkv, layer);
        crew.meet();
        if (layer + 1 < S::kNumLayers)
            prefetch_weights<typename Dims::Out>(crew, Product<S>::kOut, layer);
        if (!crew.is_ready()) return false;
        finish_qkv(crew, layer);
        crew.finish(number_of(layer, Step::kQkv), false);
        if (!crew.is_ready()) return false;
        turn_chunk(crew, pass, layer);
        // Nobody reads what comes behind the last layer's keys and values.
        if (layer + 1 == S::kNumLayers) break;
        crew.finish(number_of(layer, Step::kTurned), false);
        if (!crew.is_ready()) return false;
        const auto* const rules = reinterpret_cast<const Layer*>(crew.task().layers) + layer;
        attend_chunk(crew, pass, layer, mem::load_plain(&rules->window));
        crew.finish(number_of(layer, Step::kAttended), false);
        if (!crew.is_ready()) return false;
        multiply_chunk<typename Dims::Out>(crew, Product<S>::kOut, layer);
        crew.meet();
        prefetch_weights<typename Dims::GateUp>(crew, Product<S>::kGateUp, layer);
        if (!add_to_residual(crew, pass, 2 * layer)) return false;
        if (!crew.is_ready()) return false;
        make_scales(crew);
        crew.finish(number_of(layer, Step::kMlpScale), false);
        multiply_chunk<typename Dims::GateUp>(crew, Product<S>::kGateUp, layer);
        crew.meet();
        prefetch_weights<typename Dims::Down>(crew, Product<S>::kDown, layer);
        if (!crew.is_ready()) return false;
        finish_acts(crew, layer);
        crew.finish(number_of(layer, Step::kActs), false);
        if (!crew.is_ready()) return false;
        multiply_chunk<typename Dims::Down>(crew, Product<S>::kDown, layer);
        crew.meet();
        prefetch_weights<typename Dims::Qkv>(crew, Product<S>::kQkv, layer + 1);
        if (!add_to_residual(crew, pass, 2 * layer + 1)) return false;
    }
    crew.look_at_host(pass.number);
    crew.finish(Chunk<S>::end_of(pass.number), true);
    return true;
}

// ---- The lookout --------------------------------------------------------------------------------

// The lookout's part of a module's first product, whose vector has a norm.
template <class M, class S>
KCCL_DEVICE bool look_out_normed(Lookout<S>& lookout, uint32_t pass, uint32_t module) {
    using C = Chunk<S>;
    lookout.await_group(module_before<S>(pass, module));
    if (!lookout.let_go()) return false;
    lookout.template copy<M>(C::kNormed + lookout.group() * C::QkvPlan::kTiles * C::kStripe,
                             M::tiles_of(lookout.member()).num);
    lookout.await_group(C::number_of(pass, module / 2, scale_step(module)));
    return lookout.let_go();
}

// Of a module's last product.
template <class M, class S>
KCCL_DEVICE bool look_out_last(Lookout<S>& lookout, uint32_t pass, uint32_t module,
                               uint32_t place) {
    using C = Chunk<S>;
    const Step before = module % 2 == 0 ? Step::kAttended : Step::kActs;
    const Module rule = rule_of<S>(lookout.task(), module);
    lookout.await_group(C::number_of(pass, module / 2, before));
    if (receives<S>(rule)) {
        lookout.await_row(module_of<S>(pass, static_cast<uint32_t>(rule.receives)));
    }
    if (!lookout.let_go()) return false;
    lookout.template copy<M>(
        place + lookout.first_lane_here() * ChunkPlan<S, M>::kTiles * C::kStripe,
        M::tiles_of(lookout.member()).num);
    if (!blocks<S>(rule)) return true;
    lookout.await_row(C::number_of(pass, module / 2, sent_step(module)));
    return lookout.let_go();
}

// As compute_pass().
template <class S>
KCCL_DEVICE bool look_out(Lookout<S>& lookout, uint32_t pass) {
    using Dims = Shape<S>;
    using C = Chunk<S>;
    // All places are written anew.
    lookout.await_all(C::end_of(pass - 1));
    if (!lookout.let_go(lookout.was_given_up(pass - 1))) return false;
    for (uint32_t layer = 0; layer < S::kNumLayers; ++layer) {
        const uint32_t module = 2 * layer;
        if (!look_out_normed<typename Dims::Qkv>(lookout, pass, module)) return false;
        lookout.await_group(C::number_of(pass, layer, Step::kQkv));
        if (!lookout.let_go()) return false;
        if (layer + 1 == S::kNumLayers) break;
        lookout.await_group(C::number_of(pass, layer, Step::kTurned));
        if (!lookout.let_go()) return false;
        if (!look_out_last<typename Dims::Out>(lookout, pass, module, C::kAttended)) return false;
        if (!look_out_normed<typename Dims::GateUp>(lookout, pass, module + 1)) return false;
        if (!look_out_last<typename Dims::Down>(lookout, pass, module + 1, C::kActs)) return false;
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
