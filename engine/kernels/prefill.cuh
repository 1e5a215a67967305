// Prefill: one launch fills the KV cache with a request's positions from Task.start on, in passes
// of up to kPassPositions (prefill_shape.cuh). The host leaves the request's last id out of this
// kernel's Task.num_ids. The decode kernel, which is launched next, runs that id and all later
// ones, because only it has the head. The cache gets the same bits as from decode.
//
//     KCCL_KERNEL_OF(kPrefillThreads<S>) void prefill(DeviceComm comm, Task task) {
//         run_prefill<S>(comm, task);
//     }
//
// Launched on every rank, with S::kBlocks blocks of S::kChunkWarps + S::kChunkOthers warps, all
// resident, and sizeof(PrefillShared<S>) bytes of dynamic shared memory. Task.token_step is the
// number of passes of all earlier prefills.
//
// If a host cancels the request, all ranks end prefill after the same pass. The decode kernel then
// ends the request after one more position.
#pragma once

#include "prefill_experts.cuh"
#include "registers.cuh"

namespace kccl::decode {

template <class S>
constexpr uint32_t kPrefillThreads = (S::kChunkWarps + S::kChunkOthers) * platform::kWarpSize;

// ---- The consumer warps -------------------------------------------------------------------------

// What a consumer warp does in a chunk: walk_layer() calls run() for each op of a layer.
template <class S>
struct ConsumerOfChunk {
    using C = ChunkLayout<S>;
    using V = Vector<S>;
    PrefillConsumer<S>& consumer;
    const PromptChunk& chunk;

    // Runs op OP of a layer. In the last layer only the ops up to the new keys and values run,
    // because nothing reads what would follow.
    template <uint32_t OP>
    KCCL_DECODE Walk run(uint32_t layer) {
        constexpr auto kOp = S::kLayer[OP];
        if (!consumer.is_ready()) return Walk::kFailed;
        if constexpr (kOp.product == Product<S>::kNone) {
            turn_chunk(consumer, chunk, layer);
            if (layer + 1 == S::kNumLayers) return Walk::kIsOver;
            finish<OP>(layer, Step::kHalf);
            if (!consumer.is_ready()) return Walk::kFailed;
            const auto* const rules =
                reinterpret_cast<const Layer*>(consumer.task().layers) + layer;
            attend_chunk(consumer, chunk, layer, mem::load_plain(&rules->window));
            finish<OP>(layer, Step::kDone);
            return Walk::kGoesOn;
        } else if constexpr (is_one_of<that_have_experts<S>()>(kOp.product)) {
            return run_experts<OP>(layer);
        } else {
            if constexpr (kOp.takes == V::kResidual) {
                make_scales(consumer);
                finish<OP>(layer, Step::kHalf);
            }
            if constexpr (kOp.gives == V::kResidual) {
                ModuleEnd<OP, S> end(consumer, chunk, layer);
                if (!multiply<OP>(layer, [&](const Cut& tiles, bool) { return end.add(tiles); })) {
                    return Walk::kFailed;
                }
                end.announce();
                return Walk::kGoesOn;
            } else {
                // NVRTC takes no member of kOp as a constant within the lambda.
                constexpr auto kGives = kOp.gives;
                const bool is_done = multiply<OP>(layer, [&](const Cut& tiles, bool is_first) {
                    if (is_first && !consumer.is_ready()) return false;
                    if constexpr (kGives == V::kHeads) finish_qkv(consumer, layer, tiles);
                    if constexpr (kGives == V::kRouted) finish_router_chunk(consumer, layer);
                    if constexpr (kGives == V::kActs) finish_acts(consumer, layer, tiles);
                    return true;
                });
                if (!is_done) return Walk::kFailed;
                finish<OP>(layer, Step::kDone);
                return Walk::kGoesOn;
            }
        }
    }

  private:
    // Runs the product of op OP, a round at a time. finish(tiles, is_first) finishes the rows of a
    // round. It returns false if the producer warp has given up; then this returns false, too.
    template <uint32_t OP, class Finish>
    KCCL_DECODE bool multiply(uint32_t layer, Finish finish) {
        constexpr auto kProduct = S::kLayer[OP].product;
        using M = MatrixOf<S, kProduct>;
        constexpr uint32_t kRound = ChunkPlan<S, M>::kTilesOfRound;
        const Cut all = consumer.template tiles<M>();
        ChunkMultiplier<M, S> multiplier(consumer, kProduct, layer);
        for (uint32_t before = 0;;) {
            const Cut tiles = {all.first + before,
                               kHasSquads<S> ? least_of(all.num - before, kRound) : all.num};
            multiplier.run(tiles);
            consumer.meet();
            const bool is_first = !kHasSquads<S> || before == 0;
            before += kRound;
            const bool is_last = !kHasSquads<S> || before >= all.num;
            if (is_last) prefetch_next<OP>(layer);
            if (!finish(tiles, is_first)) return false;
            if (is_last) return true;
            consumer.meet();
        }
    }

    // Runs a product of experts. What they give is sent to all ranks, if there are several.
    template <uint32_t OP>
    KCCL_DECODE Walk run_experts(uint32_t layer) {
        if constexpr (S::kLayer[OP].gives == V::kActs) {
            choose_chunk(consumer, chunk);
            ChunkGateUp<S>(consumer, layer).run();
        } else {
            ChunkDown<S>(consumer, layer).run();
            finish<OP>(layer, Step::kHalf);
            prefetch_next<OP>(layer);
            if (!consumer.is_ready()) return Walk::kFailed;
            if constexpr (S::kWorldSize > 1) {
                send_outputs(consumer);
                consumer.finish(C::number_of(chunk.number, layer, OP, Step::kSent), true);
                if (!consumer.is_ready()) return Walk::kFailed;
            }
            add_outputs<OP>(consumer, chunk, layer);
        }
        finish<OP>(layer, Step::kDone);
        return Walk::kGoesOn;
    }

    // Announces to the blocks of this rank that this block has done a step (prefill_shape.cuh) of
    // op OP.
    template <uint32_t OP>
    KCCL_DECODE void finish(uint32_t layer, Step step) {
        consumer.finish(C::number_of(chunk.number, layer, OP, step), false);
    }
    template <uint32_t OP>
    KCCL_DECODE void prefetch_next(uint32_t layer) {
        constexpr bool kIsLast = OP + 1 == S::kNumOps;
        constexpr Product<S> kNext = next_product<S>(kIsLast ? 0 : OP + 1);
        // In the last layer, no product follows the one that gives queries, keys and values.
        constexpr bool kEndsHere = S::kLayer[OP].gives == V::kHeads;
        if (kEndsHere && layer + 1 == S::kNumLayers) return;
        // Where the weights of experts lie is not known yet.
        if constexpr (!is_one_of<that_have_experts<S>()>(kNext)) {
            prefetch_weights<MatrixOf<S, kNext>>(consumer, kNext, layer + (kIsLast ? 1 : 0));
        }
    }
};

// Computes a chunk. Called by all consumer warps. Returns false if the producer warp has given up:
// a wait failed, or the request was cancelled.
template <class S>
KCCL_DECODE bool compute_chunk(PrefillConsumer<S>& consumer, const PromptChunk& chunk) {
    if (!consumer.is_ready()) return false;
    const bool is_busy = !kHasSquads<S> || chunk.num != 0;
    if (is_busy) {
        embed_chunk(consumer, chunk);
        consumer.finish(ChunkLayout<S>::embedded_in(chunk.number), false);
    }
    ConsumerOfChunk<S> role = {consumer, chunk};
    for (uint32_t layer = 0; is_busy && layer < S::kNumLayers; ++layer) {
        const Walk walk = walk_layer<S>(role, layer);
        if (walk == Walk::kFailed) return false;
        if (walk == Walk::kIsOver) break;
    }
    consumer.look_at_host(chunk.number);
    consumer.finish(ChunkLayout<S>::end_of(chunk.number), true);
    return true;
}

// ---- The producer warp --------------------------------------------------------------------------

// What the producer warp does in a chunk: before each op it waits for the blocks whose results the
// op reads, and copies the op's vectors to the consumer warps. walk_layer() calls run() for each
// op, in the same order as in ConsumerOfChunk.
template <class S>
struct ProducerOfChunk {
    using C = ChunkLayout<S>;
    using V = Vector<S>;
    PrefillProducer<S>& producer;
    uint32_t chunk;

    template <uint32_t OP>
    KCCL_DECODE Walk run(uint32_t layer) {
        constexpr auto kOp = S::kLayer[OP];
        producer.await_squad(C::template number_before<OP>(chunk, layer));
        if constexpr (kOp.product == Product<S>::kNone) {
            if (!producer.let_go()) return Walk::kFailed;
            if (layer + 1 == S::kNumLayers) return Walk::kIsOver;
            producer.await_lane_group(C::number_of(chunk, layer, OP, Step::kHalf));
            if (!producer.let_go()) return Walk::kFailed;
            return Walk::kGoesOn;
        } else if constexpr (is_one_of<that_have_experts<S>()>(kOp.product)) {
            if (!producer.let_go()) return Walk::kFailed;
            if constexpr (kOp.gives == V::kActs) return Walk::kGoesOn;
            producer.await_squad(C::number_of(chunk, layer, OP, Step::kHalf));
            if (!producer.let_go()) return Walk::kFailed;
            if constexpr (S::kWorldSize > 1) {
                producer.await_row(C::number_of(chunk, layer, OP, Step::kSent));
                if (!producer.let_go()) return Walk::kFailed;
            }
            return Walk::kGoesOn;
        } else if constexpr (kOp.takes == V::kResidual) {
            using M = MatrixOf<S, kOp.product>;
            if (!producer.let_go()) return Walk::kFailed;
            const uint32_t before = producer.lane_group() * C::QkvPlan::kTiles * C::kStripe;
            // Behind the first round the consumer warps need the scales.
            const uint32_t num = producer.template tiles<M>().num;
            const uint32_t first = least_of(num, ChunkPlan<S, M>::kTilesOfRound);
            producer.template copy<M>(C::kNormed + before, first);
            producer.await_squad(C::number_of(chunk, layer, OP, Step::kHalf));
            if (!producer.let_go()) return Walk::kFailed;
            if (kHasSquads<S>) producer.template copy<M>(C::kNormed + before, num - first);
            return Walk::kGoesOn;
        } else {
            return add_up<OP>(layer);
        }
    }

  private:
    // Does the producer warp's work for a module's last product, whose sums are added to the
    // residual: waits for the product's vector and for the messages of an earlier module, if these
    // are added, and copies the vector. If the module adds its own messages of all lanes, waits for
    // these, too.
    template <uint32_t OP>
    KCCL_DECODE Walk add_up(uint32_t layer) {
        constexpr auto kOp = S::kLayer[OP];
        static_assert(kOp.gives == V::kResidual, "others take the residual");
        using M = MatrixOf<S, kOp.product>;
        constexpr uint32_t kSlot = kOp.takes == V::kAttended ? C::kAttended : C::kActs;
        const uint32_t module = S::kNumModules * layer + module_of_op<S>(OP);
        const Module rule = rule_of<S>(producer.task(), module);
        if (receives<S>(rule)) {
            producer.await_row(C::number_of_module(chunk, static_cast<uint32_t>(rule.receives)));
        }
        if (!producer.let_go()) return Walk::kFailed;
        const uint32_t before = producer.first_lane_here() * ChunkPlan<S, M>::kTiles * C::kStripe;
        producer.template copy<M>(kSlot + before, producer.template tiles<M>().num);
        if (!blocks<S>(rule)) return Walk::kGoesOn;
        producer.await_row(C::number_of(chunk, layer, OP, Step::kHalf));
        return producer.let_go() ? Walk::kGoesOn : Walk::kFailed;
    }
};

// Runs the producer warp for a chunk: waits for other blocks, and copies vectors. Returns false if
// a wait has failed, or if the request was cancelled in the chunk before.
template <class S>
KCCL_DECODE bool produce_chunk(PrefillProducer<S>& producer, const PromptChunk& chunk) {
    // Waits until all blocks of all ranks have ended the pass before, because each pass overwrites
    // the vectors of the one before.
    producer.await_all(ChunkLayout<S>::end_of(chunk.number - 1));
    if (!producer.let_go(producer.was_given_up(chunk.number - 1))) return false;
    if (kHasSquads<S> && chunk.num == 0) return true;
    ProducerOfChunk<S> role = {producer, chunk.number};
    for (uint32_t layer = 0; layer < S::kNumLayers; ++layer) {
        const Walk walk = walk_layer<S>(role, layer);
        if (walk == Walk::kFailed) return false;
        if (walk == Walk::kIsOver) break;
    }
    return true;
}

// ---- The kernel ---------------------------------------------------------------------------------

// Returns how many passes a request's prefill has. The host counts in the same way
// (engine/monokernel/task.py).
template <class S>
KCCL_DECODE uint32_t num_passes(const Task& task) {
    return ceil_div(task.num_ids - task.start, kPassPositions<S>);
}

// Calls run(chunk) for the chunk of the warp's block in one pass of the request after another,
// until it returns false.
template <class S, class Run>
KCCL_DECODE void for_each_pass(PrefillWarp<S>& warp, Run run) {
    uint32_t number = warp.task().token_step;
    for (uint32_t first = warp.task().start; first < warp.task().num_ids;
         first += kPassPositions<S>) {
        const PromptChunk chunk = warp.join(number++, first);
        if (!run(chunk)) return;
    }
}

template <class S>
KCCL_DECODE void run_prefill(const DeviceComm& comm, const Task& task) {
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
        PrefillConsumer<S> consumer(comm, task, shared);
        for_each_pass<S>(consumer,
                         [&](const PromptChunk& chunk) { return compute_chunk(consumer, chunk); });
        // The host has counted all passes of this request, so the next request first waits for the
        // end of the last of them. If the request was cancelled, that pass has not run, and its
        // end is announced here.
        if (consumer.is_given_up()) {
            consumer.finish(ChunkLayout<S>::end_of(task.token_step + num_passes<S>(task) - 1),
                            true);
        }
        return;
    }
    take_share<S::kChunkWarps, S::kChunkOthers>(false);
    if (warp_index == S::kChunkWarps) {
        PrefillProducer<S> producer(comm, task, shared);
        for_each_pass<S>(producer,
                         [&](const PromptChunk& chunk) { return produce_chunk(producer, chunk); });
        producer.drain();
    }
}

}  // namespace kccl::decode
