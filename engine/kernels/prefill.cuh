// Prefill: one launch fills the KV cache with the positions Task.start to Task.num_ids - 1 of a
// request, S::kChunk at a time. The decode kernel behind it does the rest, from the last id on: it
// has the head. The cache gets the same bits as from decode.
//
//     KCCL_KERNEL_OF(kPrefillThreads<S>) void prefill(DeviceComm comm, Task task) {
//         run_prefill<S>(comm, task);
//     }
//
// Launched on every rank, with S::kBlocks blocks of S::kChunkWarps + 1 warps, all resident, and
// sizeof(PrefillShared<S>) bytes of dynamic shared memory. Task.round counts the passes of all
// prefills before.
#pragma once

#include "gate_up.cuh"
#include "prefill_attend.cuh"
#include "residual.cuh"

namespace kccl::decode {

template <class S>
constexpr uint32_t kPrefillThreads = (S::kChunkWarps + 1) * platform::kWarpSize;

// Whether lanes of other groups or ranks exist.
template <class S>
constexpr bool kHasOthers = S::kNumLanes > Shape<S>::kGroupLanes;

KCCL_DEVICE Step scale_step(uint32_t module) {
    return module % 2 == 0 ? Step::kAttentionScale : Step::kMlpScale;
}
KCCL_DEVICE Step sent_step(uint32_t module) {
    return module % 2 == 0 ? Step::kAttentionSent : Step::kMlpSent;
}
// The step that ends a module.
template <class S>
KCCL_DEVICE uint32_t module_of(uint32_t pass, uint32_t module) {
    return Chunk<S>::number_of(pass, module / 2, module % 2 == 0 ? Step::kAttention : Step::kMlp);
}
// The step that gives a module its residual.
template <class S>
KCCL_DEVICE uint32_t module_before(uint32_t pass, uint32_t module) {
    return module == 0 ? Chunk<S>::number_of(pass, 0, Step::kEmbedded)
                       : module_of<S>(pass, module - 1);
}

template <class S>
KCCL_DEVICE Module rule_of(const Task& task, uint32_t module) {
    const auto* const layer = reinterpret_cast<const Layer*>(task.layers) + module / 2;
    return mem::load_plain(module % 2 == 0 ? &layer->attention : &layer->mlp);
}
template <class S>
KCCL_DEVICE bool blocks(const Module& rule) {
    return S::kHasBlocking && kHasOthers<S> && rule.is_blocking != 0;
}
template <class S>
KCCL_DEVICE bool receives(const Module& rule) {
    return S::kHasDelayed && kHasOthers<S> && rule.is_blocking == 0 && rule.receives >= 0;
}

// ---- The crew -----------------------------------------------------------------------------------

// Calls f(row tile, number of a position, quad of the tile) for `quads` quads of each of the
// block's row tiles, so that neighbours store to neighbours.
template <class S, class F>
KCCL_DEVICE void for_each_row(Crew<S>& crew, uint32_t num_tiles, uint32_t quads, F f) {
    const uint32_t each = S::kChunk * quads;
    for (uint32_t i = crew.index(); i < num_tiles * each; i += Crew<S>::kThreads) {
        f(i / each, i % each / quads, i % quads);
    }
}

// Stages a quad of the residual for the module behind it.
template <class S>
KCCL_DEVICE void stage_normed(Crew<S>& crew, uint32_t norm, uint32_t quad, uint32_t number,
                              const Quad& x) {
    const Quad weights = load_quad(crew.task().norms, uint64_t{norm} * (S::kHidden / 4) + quad);
    const Quad seen = untagged(x);
    Quad scaled;
    KCCL_UNROLL
    for (int i = 0; i < 4; ++i) scaled.value[i] = seen.value[i] * weights.value[i];
    const uint32_t place = Chunk<S>::kNormed +
                           crew.group() * Chunk<S>::QkvPlan::kTiles * Chunk<S>::kStripe +
                           Chunk<S>::at(quad, number);
    mem::store_plain(reinterpret_cast<StagedQuad*>(crew.here(place)), split<bf16>(scaled));
}

template <class S>
KCCL_DEVICE Quad* residual_at(Crew<S>& crew, uint32_t quad, uint32_t number) {
    return crew.here(Chunk<S>::kResidual + crew.group() * Chunk<S>::kHiddenQuads +
                     Chunk<S>::at(quad, number));
}

// The block's rows of the chunk's first residual. Places behind the last position get zeros.
template <class S>
KCCL_DEVICE void embed_chunk(Crew<S>& crew, const Pass& pass) {
    const Cut tiles = Shape<S>::Out::tiles_of(crew.member());
    const auto* const ids = reinterpret_cast<const int32_t*>(crew.task().ids) + pass.first;
    for_each_row(crew, tiles.num, kTileQuads, [&](uint32_t tile, uint32_t number, uint32_t i) {
        const uint32_t quad = (tiles.first + tile) * kTileQuads + i;
        const bool is_there = number < pass.num;
        const Quad x =
            is_there ? embedded<S>(crew.task(), mem::load_plain(ids + number), quad) : Quad{};
        mem::store_plain(residual_at(crew, quad, number), x);
        stage_normed(crew, 0, quad, number, x);
    });
}

// Some of the positions' scales, for all blocks of the group: the sums are added up as decode adds
// them.
template <class S>
KCCL_DEVICE void make_scales(Crew<S>& crew) {
    using M = typename Shape<S>::Qkv;
    constexpr uint32_t kEach = ceil_div(M::kQuads, platform::kWarpSize);
    constexpr uint32_t kStride = Shape<S>::kGroupBlocks;
    const uint32_t num =
        crew.member() < S::kChunk ? ceil_div(S::kChunk - crew.member(), kStride) : 0;
    auto& squares_of = crew.shared().squares;
    for (uint32_t job = crew.warp_index(); job < num * S::kWarps; job += S::kChunkWarps) {
        const uint32_t number = crew.member() + job / S::kWarps * kStride;
        const uint32_t part = job % S::kWarps;
        float squares = 0;
        KCCL_UNROLL
        for (uint32_t k = 0; k < kEach; ++k) {
            const uint32_t i = warp().index() + k * platform::kWarpSize;
            const uint32_t quad = part * M::kQuads + i;
            const bool is_there = i < M::kQuads && quad < M::kColumns / 4;
            const Quad x =
                is_there ? untagged(mem::load_plain(residual_at(crew, quad, number))) : Quad{};
            for (const float value : x.value) squares += value * value;
        }
        squares = sum_of_warp(squares);
        if (leads(warp())) mem::store_plain(&squares_of[number][part], squares);
    }
    crew.meet();
    auto* const scales =
        reinterpret_cast<float*>(crew.here(Chunk<S>::kScales)) + crew.group() * S::kChunk;
    for (uint32_t i = crew.index(); i < num; i += Crew<S>::kThreads) {
        const uint32_t number = crew.member() + i * kStride;
        float squares = 0;
        for (uint32_t part = 0; part < S::kWarps; ++part) {
            squares += mem::load_plain(&squares_of[number][part]);
        }
        mem::store_plain(scales + number,
                         1.0f / platform::square_root(squares / S::kHidden + S::kNormEps));
    }
}

template <class S>
KCCL_DEVICE float scale_of(Crew<S>& crew, uint32_t number) {
    return mem::load_plain(reinterpret_cast<const float*>(crew.here(Chunk<S>::kScales)) +
                           crew.group() * S::kChunk + number);
}

template <class S>
KCCL_DEVICE void finish_qkv(Crew<S>& crew) {
    using Dims = Shape<S>;
    constexpr uint32_t kTiles = Dims::kQkvRows / kTileRows;
    const Cut tiles = Dims::Qkv::tiles_of(crew.member());
    for_each_row(crew, tiles.num, kTileQuads, [&](uint32_t tile, uint32_t number, uint32_t i) {
        const float inverse = scale_of(crew, number);
        Quad total = total_of(crew, tile, number, i);
        for (float& value : total.value) value *= inverse;
        const uint32_t row = crew.first_lane_here() * kTiles + tiles.first + tile;
        const uint32_t place = Chunk<S>::kQkv + row * Chunk<S>::kStripe + number * kTileQuads + i;
        mem::store_plain(crew.here(place), untagged(total));
    });
}

template <class S>
KCCL_DEVICE void finish_acts(Crew<S>& crew) {
    using C = Chunk<S>;
    const Cut tiles = Shape<S>::GateUp::tiles_of(crew.member());
    constexpr uint32_t kQuads = kTileQuads / 2, kLane = Places<S>::kFfnQuads;
    for_each_row(crew, tiles.num, kQuads, [&](uint32_t tile, uint32_t number, uint32_t i) {
        const float inverse = scale_of(crew, number);
        const Quad act = act_of(total_of(crew, tile, number, i),
                                total_of(crew, tile, number, i + kQuads), inverse);
        const uint32_t feature = (tiles.first + tile) * kQuads + i;
        const uint32_t lane = crew.first_lane_here() + feature / kLane;
        const uint32_t place =
            C::kActs + lane * C::DownPlan::kTiles * C::kStripe + C::at(feature % kLane, number);
        mem::store_plain(reinterpret_cast<StagedQuad*>(crew.here(place)),
                         split<bf16>(untagged(act)));
    });
}

// What the lanes of other groups and ranks have sent for a quad, and what the group's own have.
template <class S>
KCCL_DEVICE Quad messages_of(Crew<S>& crew, uint32_t module, uint32_t quad, uint32_t number,
                             const Quad (&own)[Shape<S>::kGroupLanes], bool leaves_own) {
    const uint32_t first = crew.first_lane();
    Quad quads[S::kNumLanes];
    KCCL_UNROLL
    for (uint32_t lane = 0; lane < S::kNumLanes; ++lane) {
        const bool is_own = lane - first < Shape<S>::kGroupLanes;
        const uint32_t place = Chunk<S>::message(module, lane) + Chunk<S>::at(quad, number);
        quads[lane] = kHasOthers<S> && !is_own ? mem::load_plain(crew.here(place)) : Quad{};
    }
    return add_lanes<S>(quads, own, first, leaves_own);
}

// Adds what shared().totals has of a module to the residual. False: the lookout has given up.
template <class S>
KCCL_DEVICE bool add_to_residual(Crew<S>& crew, const Pass& pass, uint32_t module) {
    using C = Chunk<S>;
    constexpr uint32_t kLanes = Shape<S>::kGroupLanes;
    const Cut tiles = Shape<S>::Out::tiles_of(crew.member());
    const Module rule = rule_of<S>(crew.task(), module);
    const bool is_blocking = S::kHasBlocking && rule.is_blocking != 0;
    const bool sends = kHasOthers<S> && (is_blocking || rule.sends != 0);
    if (sends) {
        for_each_row(crew, tiles.num, kTileQuads, [&](uint32_t tile, uint32_t number, uint32_t i) {
            const uint32_t quad = (tiles.first + tile) * kTileQuads + i;
            for (uint32_t lane = 0; lane < kLanes; ++lane) {
                const Quad sent = as_message<S>(total_of(crew, tile * kLanes + lane, number, i));
                const uint32_t place =
                    C::message(module, crew.first_lane() + lane) + C::at(quad, number);
                for (uint32_t k = 1; k <= S::kWorldSize; ++k) {
                    const uint32_t rank = (crew.comm().rank + k) % S::kWorldSize;
                    mem::store_plain(crew.on_board(static_cast<int>(rank), place), sent);
                }
            }
        });
    }
    if (blocks<S>(rule)) {
        crew.finish(C::number_of(pass.number, module / 2, sent_step(module)), true);
        if (!crew.is_ready()) return false;
    }
    for_each_row(crew, tiles.num, kTileQuads, [&](uint32_t tile, uint32_t number, uint32_t i) {
        const uint32_t quad = (tiles.first + tile) * kTileQuads + i;
        Quad own[kLanes];
        KCCL_UNROLL
        for (uint32_t lane = 0; lane < kLanes; ++lane) {
            own[lane] = total_of(crew, tile * kLanes + lane, number, i);
        }
        Quad x = mem::load_plain(residual_at(crew, quad, number));
        if (is_blocking) {
            KCCL_UNROLL
            for (uint32_t lane = 0; lane < kLanes; ++lane) own[lane] = as_message<S>(own[lane]);
            const Quad total = messages_of(crew, module, quad, number, own, false);
            KCCL_UNROLL
            for (int j = 0; j < 4; ++j) x.value[j] += total.value[j];
        } else {
            KCCL_UNROLL
            for (int j = 0; j < 4; ++j) x.value[j] += rule.own_scale * own[0].value[j];
            if (rule.receives >= 0) {
                const Quad landed = messages_of(crew, static_cast<uint32_t>(rule.receives), quad,
                                                number, own, true);
                KCCL_UNROLL
                for (int j = 0; j < 4; ++j) x.value[j] += landed.value[j];
            }
        }
        mem::store_plain(residual_at(crew, quad, number), x);
        stage_normed(crew, module + 1, quad, number, x);
    });
    crew.finish(module_of<S>(pass.number, module), sends);
    return true;
}

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
        multiply_chunk<typename Dims::Qkv>(crew, Product::kQkv, layer);
        crew.meet();
        if (!crew.is_ready()) return false;
        finish_qkv(crew);
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
        multiply_chunk<typename Dims::Out>(crew, Product::kOut, layer);
        crew.meet();
        if (!add_to_residual(crew, pass, 2 * layer)) return false;
        if (!crew.is_ready()) return false;
        make_scales(crew);
        crew.finish(number_of(layer, Step::kMlpScale), false);
        multiply_chunk<typename Dims::GateUp>(crew, Product::kGateUp, layer);
        crew.meet();
        if (!crew.is_ready()) return false;
        finish_acts(crew);
        crew.finish(number_of(layer, Step::kActs), false);
        if (!crew.is_ready()) return false;
        multiply_chunk<typename Dims::Down>(crew, Product::kDown, layer);
        crew.meet();
        if (!add_to_residual(crew, pass, 2 * layer + 1)) return false;
    }
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
    if (!lookout.let_go()) return false;
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
        shared.failed = 0;
        mem::init_copies(&shared.met, S::kChunkWarps);
        mem::init_copies(&shared.ready, 1);
    }
    init_ring(block(), shared.ring, S::kChunkWarps);
    if (platform::thread_in_block() / platform::kWarpSize == S::kChunkWarps) {
        Lookout<S> lookout(comm, task, shared);
        for_each_pass<S>(task, [&](const Pass& pass) { return look_out(lookout, pass.number); });
        lookout.drain();
    } else {
        Crew<S> crew(comm, task, shared);
        for_each_pass<S>(task, [&](const Pass& pass) { return compute_pass(crew, pass); });
    }
}

}  // namespace kccl::decode
