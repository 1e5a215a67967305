// What a block of prefill does with its rows of a chunk's vectors: the embedding, the norms, and
// what comes behind each product. And the steps that tell others of it.
#pragma once

#include "gate_up.cuh"
#include "prefill_attend.cuh"
#include "residual.cuh"

namespace kccl::decode {

// Whether lanes of other groups or ranks exist.
template <class S>
constexpr bool kHasOthers = S::kNumLanes > Shape<S>::kGroupLanes;

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

// Calls f(row tile, number of a position, quad of the tile) for `quads` quads of each of the
// block's row tiles, so that neighbours store to neighbours.
template <class S, class F>
KCCL_DEVICE void for_each_row(Crew<S>& crew, uint32_t num_tiles, uint32_t quads, F f) {
    const uint32_t each = S::kChunk * quads;
    for (uint32_t i = crew.index(); i < num_tiles * each; i += Crew<S>::kThreads) {
        f(i / each, i % each / quads, i % quads);
    }
}

template <class S>
KCCL_DEVICE Quad norm_of(Crew<S>& crew, uint32_t norm, uint32_t quad) {
    return load_quad(crew.task().norms, uint64_t{norm} * (S::kHidden / 4) + quad);
}

// Stages a quad of the residual, times the next norm's weights, for the module behind it.
template <class S>
KCCL_DEVICE void stage_normed(Crew<S>& crew, const Quad& weights, uint32_t quad, uint32_t number,
                              const Quad& x) {
    const Quad seen = untagged(x);
    Quad scaled;
    KCCL_UNROLL
    for (int i = 0; i < 4; ++i) scaled.value[i] = seen.value[i] * weights.value[i];
    const uint32_t place = Chunk<S>::kNormed +
                           crew.group() * Chunk<S>::QkvPlan::kTiles * Chunk<S>::kStripe +
                           Chunk<S>::at(quad, number);
    mem::store_plain(reinterpret_cast<StagedQuad*>(crew.here(place)),
                     split<typename S::Weight>(scaled));
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
        stage_normed(crew, norm_of(crew, 0, quad), quad, number, x);
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
                         reciprocal_root(squares * (1.0f / S::kHidden) + S::kNormEps));
    }
}

template <class S>
KCCL_DEVICE float scale_of(Crew<S>& crew, uint32_t number) {
    return mem::load_plain(reinterpret_cast<const float*>(crew.here(Chunk<S>::kScales)) +
                           crew.group() * S::kChunk + number);
}

template <class S>
KCCL_DEVICE void finish_qkv(Crew<S>& crew, uint32_t layer) {
    using Dims = Shape<S>;
    constexpr uint32_t kTiles = Dims::kQkvRows / kTileRows;
    const Cut tiles = Dims::Qkv::tiles_of(crew.member());
    for_each_row(crew, tiles.num, kTileQuads, [&](uint32_t tile, uint32_t number, uint32_t i) {
        const uint32_t quad = (tiles.first + tile) * kTileQuads + i;
        const Quad total = scaled<S>(crew.task(), Product<S>::kQkv, layer, quad,
                                     total_of(crew, tile, number, i), scale_of(crew, number));
        const uint32_t row = crew.first_lane_here() * kTiles + tiles.first + tile;
        const uint32_t place = Chunk<S>::kQkv + row * Chunk<S>::kStripe + number * kTileQuads + i;
        mem::store_plain(crew.here(place), untagged(total));
    });
}

template <class S>
KCCL_DEVICE void finish_acts(Crew<S>& crew, uint32_t layer) {
    using C = Chunk<S>;
    const Cut tiles = Shape<S>::GateUp::tiles_of(crew.member());
    constexpr uint32_t kQuads = kTileQuads / 2, kLane = Places<S>::kFfnQuads;
    for_each_row(crew, tiles.num, kQuads, [&](uint32_t tile, uint32_t number, uint32_t i) {
        const float inverse = scale_of(crew, number);
        const Quad act =
            act_of<S>(crew.task(), layer, tiles.first + tile, i, total_of(crew, tile, number, i),
                      total_of(crew, tile, number, i + kQuads), inverse);
        const uint32_t feature = (tiles.first + tile) * kQuads + i;
        const uint32_t lane = crew.first_lane_here() + feature / kLane;
        const uint32_t place =
            C::kActs + lane * C::DownPlan::kTiles * C::kStripe + C::at(feature % kLane, number);
        mem::store_plain(reinterpret_cast<StagedQuad*>(crew.here(place)),
                         split<typename S::Weight>(untagged(act)));
    });
}

template <class S>
KCCL_DEVICE auto* message_at(Crew<S>& crew, int rank, uint32_t index) {
    using Type = typename Chunk<S>::Sent::Type;
    return reinterpret_cast<Type*>(crew.on_board(rank, Chunk<S>::kMessages)) + index;
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
        add_lane(&total, part, is_first);
        is_first = false;
    }
    return total;
}

// What all lanes have sent for a quad.
template <class S>
struct Messages {
    typename Chunk<S>::Sent::Type of_lane[S::kNumLanes];
};

// Also those of the group's own lanes, which nobody uses. A condition would make a load wait for
// the one before.
template <class S>
KCCL_DEVICE Messages<S> load_messages(Crew<S>& crew, uint32_t module, uint32_t quad,
                                      uint32_t number) {
    Messages<S> messages = {};
    if (!kHasOthers<S>) return messages;
    const auto* const first =
        message_at(crew, crew.comm().rank, Chunk<S>::message_at(module, 0, quad, number));
    KCCL_UNROLL
    for (uint32_t lane = 0; lane < S::kNumLanes; ++lane) {
        messages.of_lane[lane] = mem::load_plain(first + uint64_t{lane} * Chunk<S>::kHiddenQuads);
    }
    return messages;
}

// Adds up what the lanes of other groups and ranks have sent, and what the group's own have.
template <class S>
KCCL_DEVICE Quad add_messages(Crew<S>& crew, const Messages<S>& messages,
                              const Quad (&own)[Shape<S>::kGroupLanes], bool leaves_own) {
    Quad quads[S::kNumLanes];
    KCCL_UNROLL
    for (uint32_t lane = 0; lane < S::kNumLanes; ++lane) {
        quads[lane] = Chunk<S>::Sent::unpack(messages.of_lane[lane]);
    }
    return add_lanes<S>(quads, own, crew.first_lane(), leaves_own);
}

// Sends what shared().totals has of a module to all ranks.
template <class S>
KCCL_DEVICE void send_messages(Crew<S>& crew, uint32_t module) {
    using C = Chunk<S>;
    constexpr uint32_t kLanes = Shape<S>::kGroupLanes;
    const Cut tiles = Shape<S>::Out::tiles_of(crew.member());
    for_each_row(crew, tiles.num, kTileQuads, [&](uint32_t tile, uint32_t number, uint32_t i) {
        const uint32_t quad = (tiles.first + tile) * kTileQuads + i;
        for (uint32_t lane = 0; lane < kLanes; ++lane) {
            const auto sent =
                C::Sent::pack(as_message<S>(total_of(crew, tile * kLanes + lane, number, i)));
            const uint32_t index = C::message_at(module, crew.first_lane() + lane, quad, number);
            for (uint32_t k = 1; k <= S::kWorldSize; ++k) {
                const uint32_t rank = (crew.comm().rank + k) % S::kWorldSize;
                mem::store_plain(message_at(crew, static_cast<int>(rank), index), sent);
            }
        }
    });
}

// What is added to a quad of the residual, besides the module's own output.
template <class S>
struct Terms {
    Quad x;
    Quad norm;
    Messages<S> landed;
};

// Adds what shared().totals has of a module to the block's rows of the residual; and messages of
// module `sent_by`, if TAKES_MESSAGES.
template <bool TAKES_MESSAGES, class S>
KCCL_DEVICE void add_to_rows(Crew<S>& crew, uint32_t module, bool is_blocking, float own_scale,
                             uint32_t sent_by) {
    constexpr uint32_t kLanes = Shape<S>::kGroupLanes;
    const Cut tiles = Shape<S>::Out::tiles_of(crew.member());
    const auto load = [&](uint32_t tile, uint32_t number, uint32_t i) {
        const uint32_t quad = (tiles.first + tile) * kTileQuads + i;
        Terms<S> terms = {
            mem::load_plain(residual_at(crew, quad, number)), norm_of(crew, module + 1, quad), {}};
        if (TAKES_MESSAGES) terms.landed = load_messages(crew, sent_by, quad, number);
        return terms;
    };
    const auto use = [&](uint32_t tile, uint32_t number, uint32_t i, const Terms<S>& terms) {
        const uint32_t quad = (tiles.first + tile) * kTileQuads + i;
        Quad x = terms.x;
        Quad own[kLanes] = {};
        if (is_blocking) {
            KCCL_UNROLL
            for (uint32_t lane = 0; lane < kLanes; ++lane) {
                own[lane] = as_message<S>(total_of(crew, tile * kLanes + lane, number, i));
            }
        } else {
            const Quad output = total_of(crew, tile * kLanes, number, i);
            KCCL_UNROLL
            for (int j = 0; j < 4; ++j) x.value[j] += own_scale * output.value[j];
        }
        if (TAKES_MESSAGES) {
            Quad landed = add_messages(crew, terms.landed, own, !is_blocking);
            if (is_blocking) landed = plus_biases<S>(crew.task(), module, quad, landed);
            KCCL_UNROLL
            for (int j = 0; j < 4; ++j) x.value[j] += landed.value[j];
        }
        mem::store_plain(residual_at(crew, quad, number), x);
        stage_normed(crew, terms.norm, quad, number, x);
    };
    // Several quads' terms are on their way at a time.
    constexpr uint32_t kAtOnce = 2, kEach = S::kChunk * kTileQuads;
    const uint32_t num = tiles.num * kEach;
    for (uint32_t first = crew.index(); first < num; first += kAtOnce * Crew<S>::kThreads) {
        const auto index_of = [&](uint32_t k) { return first + k * Crew<S>::kThreads; };
        Terms<S> terms[kAtOnce];
        KCCL_UNROLL
        for (uint32_t k = 0; k < kAtOnce; ++k) {
            // Behind the last one, the thread loads its first one again: see load_messages().
            const uint32_t i = index_of(k) < num ? index_of(k) : first;
            terms[k] = load(i / kEach, i % kEach / kTileQuads, i % kTileQuads);
        }
        KCCL_UNROLL
        for (uint32_t k = 0; k < kAtOnce; ++k) {
            const uint32_t i = index_of(k);
            if (i < num) use(i / kEach, i % kEach / kTileQuads, i % kTileQuads, terms[k]);
        }
    }
}

// Adds what shared().totals has of a module, which op OP ends, to the residual. False: the lookout
// has given up.
template <uint32_t OP, class S>
KCCL_DEVICE bool add_to_residual(Crew<S>& crew, const Pass& pass, uint32_t layer) {
    using C = Chunk<S>;
    const uint32_t module = S::kNumModules * layer + module_of_op<S>(OP);
    const Module rule = rule_of<S>(crew.task(), module);
    const bool is_blocking = S::kHasBlocking && rule.is_blocking != 0;
    const bool sends = kHasOthers<S> && (is_blocking || rule.sends != 0);
    if (sends) send_messages(crew, module);
    if (blocks<S>(rule)) {
        crew.finish(C::number_of(pass.number, layer, OP, Step::kHalf), true);
        if (!crew.is_ready()) return false;
    }
    if (is_blocking) {
        add_to_rows<true>(crew, module, true, rule.own_scale, module);
    } else if (S::kHasDelayed && rule.receives >= 0) {
        add_to_rows<true>(crew, module, false, rule.own_scale,
                          static_cast<uint32_t>(rule.receives));
    } else {
        add_to_rows<false>(crew, module, false, rule.own_scale, 0);
    }
    crew.finish(C::number_of(pass.number, layer, OP, Step::kDone), sends);
    return true;
}

}  // namespace kccl::decode
