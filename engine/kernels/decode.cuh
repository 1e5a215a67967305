// The monokernel: one launch runs a whole request on a rank, token after token.
//
//     KCCL_KERNEL_OF(kDecodeThreads<S>) void decode(DeviceComm comm, Task task) {
//         run<S>(comm, task);
//     }
//
// Launched on every rank, with S::kBlocks blocks of S::kWarps + S::kOthers warps, all resident, and
// sizeof(Shared<S>) bytes of dynamic shared memory. comm's scratch is not used; its waits are.
#pragma once

#include "attend.cuh"
#include "collect.cuh"
#include "finish.cuh"
#include "gate_up.cuh"
#include "head.cuh"
#include "out.cuh"
#include "qkv.cuh"
#include "registers.cuh"
#include "residual.cuh"
#include "stream.cuh"

namespace kccl::decode {

template <class S>
constexpr uint32_t kDecodeThreads = (S::kWarps + S::kOthers) * platform::kWarpSize;

// Lets the groups begin a round one after another. They have the same work, and would all wait for
// their exchanges at the same time, in which the memory has nothing to do.
template <class S>
KCCL_DEVICE void stagger(const Worker<S>& worker) {
    if constexpr (S::kStaggerNs != 0 && S::kOverlaps) {
        const uint64_t begin = mem::clock_ns();
        const uint64_t late_ns = worker.group() % S::kStaggers * uint64_t{S::kStaggerNs};
        while (mem::clock_ns() - begin < late_ns) mem::poll_pause();
    }
}

// Waits for this warp's part of what a product multiplies, and stages it.
template <class S>
KCCL_DEVICE void stage_vector(Worker<S>& worker, const Turn<S>& turn, int32_t token) {
    static_assert(has_only_attention_between<S>(), "decode has no code for another such op");
    static_assert(S::kNumModules == 2, "a layer is attention and an MLP");
    using Dims = Shape<S>;
    using Vector = Vector<S>;
    const uint32_t layer = turn.layer;
    if (takes<S, Vector::kResidual>(turn.product)) {
        const uint32_t module = turn.module;
        stage_residual<typename Dims::Qkv>(worker, static_cast<int32_t>(module) - 1, module, token);
    } else if (takes<S, Vector::kActs>(turn.product)) {
        stage_lanes<typename Dims::Down>(
            worker, [&](uint32_t lane) { return Places<S>::act(layer, lane); });
    } else if constexpr (S::kMergesFirst) {
        stage_lanes<typename Dims::Out>(
            worker, [&](uint32_t lane) { return Places<S>::attended(layer, lane); });
    } else {
        stage_parts<typename Dims::Out>(worker, layer);
    }
}

// One position through all layers. False: a wait failed.
template <class S>
KCCL_DEVICE bool run_layers(Worker<S>& worker, uint32_t position, int32_t token) {
    using Dims = Shape<S>;
    using Vector = Vector<S>;
    using M = typename Shape<S>::Out;
    const Cut tiles = M::tiles_of(worker.member());
    KCCL_UNROLL
    for (uint32_t k = 0; k < Shape<S>::kOwnQuads; ++k) {
        const uint32_t quad = own_quad(worker, k);
        const bool is_there = quad < tiles.num * kTileQuads;
        worker.residual[k] =
            is_there ? embedded<S>(worker.task(), token, tiles.first * kTileQuads + quad) : Quad{};
    }
    worker.stamp_begin();
    // All warps meet before attention needs them, and after the last round's did.
    for (uint32_t i = platform::thread_in_block(); i < S::kHeadDim / 2; i += Shape<S>::kConsumers) {
        const uint64_t at = uint64_t{position} * (S::kHeadDim / 2) + i;
        worker.shared().cosines[i] =
            mem::load_plain(reinterpret_cast<const float*>(worker.task().cosines) + at);
        worker.shared().sines[i] =
            mem::load_plain(reinterpret_cast<const float*>(worker.task().sines) + at);
    }
    stagger(worker);
    // One loop over the products, so that what they share is in the code once.
#pragma unroll 1
    for (uint32_t i = 0; i < kTurnsOfLayers<S>; ++i) {
        const Turn<S> turn = turn_at<S>(i);
        const uint32_t layer = turn.layer, module = turn.module;
        const Product<S> product = turn.product;
        const Layer* const rules = worker.shared().layers + layer;
        worker.next_op();
        const Steps steps = steps_of_product<S>(worker.block(), product);
        if (product == Product<S>::kOut) prefetch_norm<typename Dims::GateUp>(worker, module);
        if (product == Product<S>::kDown) prefetch_norm<typename Dims::Qkv>(worker, module + 1);
        prefetch_biases(worker, product, layer);
        // A block without rows of the product needs no vector.
        FirstStage<S> first;
        if (steps.num != 0) {
            load_first(worker, &first);
            stage_vector(worker, turn, token);
        }
        worker.stamp(kKcclDecodeArrived);
        multiply(worker, steps, first);
        worker.stamp(kKcclDecodeMultiplied);
        if (!worker.meet()) return false;
        worker.stamp(kKcclDecodeMet);
        if (gives<S, Vector::kHeads>(product)) {
            finish_qkv(worker, layer);
            worker.meet_all();
            if (!attend(worker, layer, mem::load_plain(&rules->window), position)) return false;
        } else if (gives<S, Vector::kActs>(product)) {
            finish_acts(worker, layer);
        } else {
            const Module rule =
                mem::load_plain(product == Product<S>::kOut ? &rules->attention : &rules->mlp);
            add_to_residual(worker, module, rule, module + 1 == Shape<S>::kModules);
        }
        worker.meet_all();
    }
    worker.end_meetings();
    return true;
}

// The warps that multiply.
template <class S>
KCCL_DEVICE void multiply_all(const DeviceComm& comm, const Task& task, Shared<S>& shared) {
    Worker<S> worker(comm, task, shared);
    const auto* const ids = reinterpret_cast<const int32_t*>(task.ids);
    Verdict verdict = {0, kKcclEngineGoesOn};
    for (uint32_t turn = 0; task.only_reads != 0 && turn < task.max_tokens; ++turn) {
        worker.weights().begin_round(true);
        for_each_stage<S>(worker.block(), true, [&](uint32_t num_bytes, Product<S>, bool) {
            worker.weights().skip(num_bytes / (S::kWarps * kTileBytes));
            return true;
        });
    }
    if (task.only_reads != 0) verdict.end = kKcclEngineMaxTokens;
    if constexpr (S::kSamples) mark_ids(worker);
    for (uint32_t position = task.start; verdict.end == kKcclEngineGoesOn; ++position) {
        const int32_t token =
            position < task.num_ids ? mem::load_plain(ids + position) : verdict.id;
        Best best = {0, -1, false};
        worker.weights().begin_round(wants_head(task, position));
        if (!run_layers(worker, position, token) ||
            (wants_head(task, position) && !head(worker, position, &best)) ||
            !finish(worker, position, best, &verdict)) {
            break;
        }
    }
    // The producer may end when no warp waits for it any more.
    worker.meet();
    if (leads(block())) {
        mem::arrive(&shared.ended);
        if (platform::block_in_grid() == 0) {
            auto* const mailbox = reinterpret_cast<Mailbox*>(task.mailbox);
            mem::store<mem::Order::kRelaxed, mem::Scope::kSystem>(&mailbox->rounds, worker.round());
            mem::store<mem::Order::kRelaxed, mem::Scope::kSystem>(
                &mailbox->exchanges, mem::load_plain(&shared.exchanges));
        }
    }
}

template <class S>
KCCL_DEVICE void run(const DeviceComm& comm, const Task& task) {
    auto& shared = *reinterpret_cast<Shared<S>*>(platform::dynamic_shared());
    if (leads(block())) {
        shared.exchanges = task.exchange;
        shared.landed_failed = 0;
        mem::init_copies(&shared.has_landed, 1);
        mem::init_copies(&shared.was_read, S::kWarps);
        mem::init_copies(&shared.asked, S::kWarps);
        init_meeting(shared.met, S::kWarps);
        mem::init_copies(&shared.ended, 1);
        mem::init_copies(&shared.gave_up, 1);
    }
    constexpr uint32_t kWords = S::kNumLayers * (sizeof(Layer) / sizeof(uint32_t));
    for (uint32_t i = platform::thread_in_block(); i < kWords; i += kDecodeThreads<S>) {
        mem::store_plain(reinterpret_cast<uint32_t*>(shared.layers) + i,
                         mem::load_plain(reinterpret_cast<const uint32_t*>(task.layers) + i));
    }
    if constexpr (S::kWeightsInRegisters) {
        if (leads(block())) mem::fence_copies();
        block().sync();
    } else {
        init_ring(block(), shared.ring, S::kWarps);
    }
    if (platform::thread_in_block() / platform::kWarpSize < S::kWarps) {
        take_share<S::kWarps, S::kOthers>(true);
        multiply_all(comm, task, shared);
    } else {
        take_share<S::kWarps, S::kOthers>(false);
        const uint32_t other = platform::thread_in_block() / platform::kWarpSize - S::kWarps;
        if (other == 0) {
            if constexpr (S::kWeightsInRegisters) {
                watch_until<S>(comm, task, &shared.ended, &shared.gave_up);
            } else {
                stream(comm, task, shared);
            }
        }
        if (other == 1) collect(comm, task, shared);
    }
}

}  // namespace kccl::decode
