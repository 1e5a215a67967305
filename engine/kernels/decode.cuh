// The monokernel: one launch runs a whole request on a rank, token after token.
//
//     KCCL_KERNEL_OF(kDecodeThreads<S>) void decode(DeviceComm comm, Task task) {
//         run<S>(comm, task);
//     }
//
// Launched on every rank, with S::kBlocks blocks of S::kWarps + S::kOthers warps, all resident, and
// sizeof(Shared<S>) bytes of dynamic shared memory. Of comm, the kernel uses only the rank and what
// waits need, not the scratch memory.
#pragma once

#include "attend.cuh"
#include "attend_columns.cuh"
#include "attend_seats.cuh"
#include "collect.cuh"
#include "experts.cuh"
#include "finish_seats.cuh"
#include "gate_up.cuh"
#include "head.cuh"
#include "out.cuh"
#include "qkv.cuh"
#include "registers.cuh"
#include "residual.cuh"
#include "stream.cuh"
#include "stream_experts.cuh"

namespace kccl::decode {

template <class S>
constexpr uint32_t kDecodeThreads = (S::kWarps + S::kOthers) * platform::kWarpSize;

// How many registers a thread has in the producer warp and in the warps beside it. A mixture's
// producer keeps more values between two stages, and a spilled value costs time in each stage.
template <class S>
constexpr uint32_t kRegistersOfProducer = S::kHasExperts ? 80 : kRegistersOfOthers;

// Lets the lane groups (the blocks that share a residual) begin a token step one after another.
// All lane groups have the same work. If they began together, they would all wait for their
// exchanges at the same time, and the memory would be idle meanwhile.
template <class S>
KCCL_DECODE void stagger(const ConsumerWarp<S>& consumer) {
    if constexpr (S::kStaggerNs != 0 && S::kOverlaps) {
        const uint64_t begin = mem::clock_ns();
        const uint64_t late_ns = consumer.lane_group() % S::kStaggers * uint64_t{S::kStaggerNs};
        while (mem::clock_ns() - begin < late_ns) mem::poll_pause();
    }
}

// Waits for this warp's part of the vector that a product multiplies, and stages it: stores it in
// shared memory for the matrix unit.
template <class S>
KCCL_DECODE void stage_vector(ConsumerWarp<S>& consumer, const Turn<S>& turn, int32_t token) {
    static_assert(has_only_attention_between<S>(), "decode has no code for another such op");
    static_assert(S::kNumModules == 2, "a layer is attention and an MLP");
    using Dims = Shape<S>;
    using Vector = Vector<S>;
    const uint32_t layer = turn.layer;
    if (takes<S, Vector::kResidual>(turn.product)) {
        const uint32_t module = turn.module;
        with_format<S>(turn.product,
                       StageResidual<typename Dims::OfResidual, S>{
                           consumer, static_cast<int32_t>(module) - 1, module, token});
    } else if (takes<S, Vector::kActs>(turn.product)) {
        if constexpr (S::kHasExperts) {
            stage_expert_acts(consumer, layer);
        } else {
            stage_lanes<typename Dims::Down>(
                consumer, [&](uint32_t lane) { return Slots<S>::act(layer, lane); });
        }
    } else if constexpr (S::kMergesFirst) {
        stage_lanes<typename Dims::Out, true>(
            consumer, [&](uint32_t lane) { return Slots<S>::attended(layer, lane); });
    } else {
        stage_partials<typename Dims::Out>(consumer, layer);
    }
}

// Runs the positions of a token step through all layers: those from `position` on, one for each
// column that is used. token: the first one's id. Called by all consumer warps. Returns false if a
// wait failed.
template <class S>
KCCL_DECODE bool run_layers(ConsumerWarp<S>& consumer, uint32_t position, int32_t token) {
    using Dims = Shape<S>;
    using Vector = Vector<S>;
    using M = typename Shape<S>::Out;
    const Cut tiles = M::tiles_of(consumer.block_in_group());
    KCCL_UNROLL
    for (uint32_t k = 0; k < Shape<S>::kOwnFloat4s; ++k) {
        const OwnRows rows = own_rows<kMostOfResidual<S>>(consumer, k);
        const bool is_there = has_rows(consumer, rows, tiles.num * kTileFloat4s);
        consumer.residual[k] =
            is_there ? embedded<S>(consumer.task(), consumer.id_of(token, rows.column),
                                   tiles.first * kTileFloat4s + rows.index4)
                     : Float4{};
    }
    consumer.stamp_begin();
    // These rows of RoPE's tables go into shared memory without a wait of their own: all warps meet
    // before attention reads them, and have met since attention of the last token step read them.
    for (uint32_t i = platform::thread_in_block(); i < consumer.num_columns() * (S::kHeadDim / 2);
         i += Shape<S>::kConsumerThreads) {
        uint64_t at = uint64_t{position} * (S::kHeadDim / 2) + i;
        if constexpr (S::kHasSeats) {
            const uint32_t column = i / (S::kHeadDim / 2);
            at = uint64_t{position_of<S>(consumer.task(), position, column)} * (S::kHeadDim / 2) +
                 i % (S::kHeadDim / 2);
        }
        consumer.shared().cosines[i] =
            mem::load_plain(reinterpret_cast<const float*>(consumer.task().cosines) + at);
        consumer.shared().sines[i] =
            mem::load_plain(reinterpret_cast<const float*>(consumer.task().sines) + at);
    }
    stagger(consumer);
    constexpr Product<S> kLast = S::kLayer[end_of_module<S>(S::kNumModules - 1)].product;
    // One loop runs all products of a layer, so that the code that they share exists once.
#pragma unroll 1
    for (uint32_t i = 0; i < kTurnsOfLayers<S>; ++i) {
        const Turn<S> turn = turn_at<S>(i);
        const uint32_t layer = turn.layer, module = turn.module;
        const Product<S> product = turn.product;
        const Layer* const rules = consumer.shared().layers + layer;
        consumer.next_op();
        const Steps steps = steps_of_product<S>(consumer.block(), product);
        if (product == Product<S>::kOut) prefetch_norm<typename Dims::OfMlp>(consumer, module);
        if (product == kLast) prefetch_norm<typename Dims::Qkv>(consumer, module + 1);
        prefetch_biases(consumer, product, layer);
        // A block without rows of the product needs no vector.
        FirstStage<S> first;
        if constexpr (S::kHasExperts) {
            consumer.weights().begin_product(consumer.block(), layer, product);
        }
        if (steps.num != 0) {
            with_format<S>(product, LoadFirst<S>{consumer, &first});
            stage_vector(consumer, turn, token);
        }
        if constexpr (S::kHasExperts) {
            if (product == Product<S>::kExpertGateUp && consumer.warp_index() == 0) {
                route(consumer, layer);
            }
        }
        consumer.stamp(kKcclDecodeArrived);
        with_format<S>(product, Multiply<S>{consumer, steps, first});
        if constexpr (S::kHasExperts) consumer.weights().end_product(product);
        consumer.stamp(kKcclDecodeMultiplied);
        if (!consumer.meet()) return false;
        consumer.stamp(kKcclDecodeMet);
        if (gives<S, Vector::kHeads>(product)) {
            finish_qkv(consumer, layer);
            consumer.meet_all();
            const uint32_t window = mem::load_plain(&rules->window);
            if constexpr (S::kColumns == 1) {
                if (!attend(consumer, layer, window, position)) return false;
            } else if constexpr (S::kHasSeats) {
                if (!attend_seats(consumer, layer, window, position)) return false;
            } else {
                if (!attend_columns(consumer, layer, window, position)) return false;
            }
        } else if (gives<S, Vector::kRouted>(product)) {
            if constexpr (S::kHasExperts) finish_router(consumer, layer);
        } else if (gives<S, Vector::kActs>(product)) {
            if constexpr (S::kHasExperts) {
                finish_expert_acts(consumer, layer);
            } else {
                finish_acts(consumer, layer);
            }
        } else {
            const Module rule = mem::load_plain(rule_of_product<S>(*rules, product));
            add_to_residual(consumer, module, rule, module + 1 == Shape<S>::kModules);
        }
        consumer.meet_all();
    }
    consumer.end_meetings();
    return true;
}

// Ends a token step: see finish() and finish_seats().
template <class S>
KCCL_DECODE bool end_token_step(ConsumerWarp<S>& consumer, uint32_t position, const Bests<S>& best,
                                Verdict* verdict) {
    if constexpr (S::kHasSeats) return finish_seats(consumer, position, best, verdict);
    return finish(consumer, position, best, verdict);
}

// Runs the request, token step after token step. Called by all consumer warps.
template <class S>
KCCL_DECODE void multiply_all(const DeviceComm& comm, const Task& task, Shared<S>& shared) {
    ConsumerWarp<S> consumer(comm, task, shared);
    const auto* const ids = reinterpret_cast<const int32_t*>(task.ids);
    Verdict verdict = {goes_on(task) ? mem::load_plain(ids + task.start) : 0, kKcclEngineGoesOn};
    for (uint32_t turn = 0; task.only_reads != 0 && turn < task.max_tokens; ++turn) {
        consumer.weights().begin_token_step(true);
        if constexpr (S::kHasExperts) {
            for_each_used_stage<S>(consumer.block(), consumer.weights(),
                                   [&](uint32_t steps) { consumer.weights().skip(steps); });
        } else {
            for_each_stage<S>(consumer.block(), true,
                              [&](uint32_t num_bytes, Product<S> product, bool) {
                                  consumer.weights().skip(num_bytes / step_bytes<S>(product));
                                  return true;
                              });
        }
    }
    if (task.only_reads != 0) verdict.end = kKcclEngineMaxTokens;
    if constexpr (S::kSamples) begin_texts(consumer);
    if constexpr (S::kColumns > 1) {
        if (leads(block())) mem::store_plain(&shared.pace, pace_of(task));
        consumer.end_columns(0, columns_of<S>(task, task.start));
        if (goes_on(task) && !begin_with_drafts(consumer, verdict.id)) {
            verdict.end = kKcclEngineCancelled;
        }
    }
    uint32_t position = task.start;
    for (; verdict.end == kKcclEngineGoesOn; position += consumer.num_kept()) {
        const int32_t token =
            position < task.num_ids ? mem::load_plain(ids + position) : verdict.id;
        Bests<S> best = no_bests<S>();
        consumer.begin_columns(position, token);
        if constexpr (S::kHasSeats) ask_hosts(consumer);
        const uint32_t last = position + consumer.num_columns() - 1;
        consumer.weights().begin_token_step(wants_head(task, last));
        if (!run_layers(consumer, position, token) ||
            (wants_head(task, last) && !head(consumer, position, &best)) ||
            !end_token_step(consumer, position, best, &verdict)) {
            break;
        }
    }
    // All warps meet before one thread tells the producer warp to end, because none of them may
    // still wait for weights then.
    consumer.meet();
    if (leads(block())) {
        mem::arrive(&shared.ended);
        if (platform::block_in_grid() == 0) {
            auto* const mailbox = reinterpret_cast<Mailbox*>(task.mailbox);
            mem::store<mem::Order::kRelaxed, mem::Scope::kSystem>(&mailbox->token_steps,
                                                                  consumer.token_step());
            mem::store<mem::Order::kRelaxed, mem::Scope::kSystem>(
                &mailbox->exchanges, mem::load_plain(&shared.exchanges));
            if constexpr (S::kColumns > 1) {
                mem::store<mem::Order::kRelaxed, mem::Scope::kSystem>(&mailbox->uses,
                                                                      word_of(consumer.uses()));
            }
            if (verdict.end == kLeaves) leave(task, shared, position);
        }
        if constexpr (S::kHasSeats && S::kSamples) store_seat_exchanges(consumer);
    }
}

template <class S>
KCCL_DECODE void run(const DeviceComm& comm, const Task& task) {
    auto& shared = *reinterpret_cast<Shared<S>*>(platform::dynamic_shared());
    if (leads(block())) {
        shared.exchanges = task.exchange;
        if constexpr (S::kHasSeats && S::kSamples) load_seat_exchanges(comm, task, shared);
        shared.landed_failed = 0;
        mem::init_copies(&shared.has_landed, 1);
        mem::init_copies(&shared.was_read, S::kWarps);
        mem::init_copies(&shared.asked, S::kWarps);
        init_meeting(shared.met, S::kWarps);
        if constexpr (S::kHasExperts) mem::init_copies(&shared.has_chosen, 1);
        if constexpr (kHasExpertBiases<S>) mem::init_copies(&shared.have_biases, 1);
        if constexpr (S::kColumns > 1) mem::init_copies(&shared.begun, 1);
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
        take_share<S::kWarps, S::kOthers, kRegistersOfProducer<S>>(true);
        multiply_all(comm, task, shared);
    } else {
        take_share<S::kWarps, S::kOthers, kRegistersOfProducer<S>>(false);
        const uint32_t other = platform::thread_in_block() / platform::kWarpSize - S::kWarps;
        const auto run_first = [&] {
            if constexpr (S::kWeightsInRegisters) {
                watch_until<S>(comm, task, &shared.ended, &shared.gave_up);
            } else if constexpr (S::kHasExperts) {
                stream_mixture(comm, task, shared);
            } else {
                stream(comm, task, shared);
            }
        };
        if constexpr (kHasExpertBiases<S>) {
            static_assert(!S::kHasDelayed, "the second warp has messages to collect");
            // A value from a shuffle is uniform for the compiler. So it keeps what the producer
            // warp needs in uniform registers, of which there are enough.
            const uint32_t uniform = platform::shuffle_word(other, 0);
            if (uniform == 0) {
                run_first();
            } else if (uniform == 1) {
                copy_expert_biases(task, shared);
            }
        } else {
            if (other == 0) run_first();
            if (other == 1) collect(comm, task, shared);
        }
    }
}

}  // namespace kccl::decode
