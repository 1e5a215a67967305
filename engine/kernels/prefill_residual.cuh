// Adds a module's output to the residuals of a chunk, and sends it to other lanes as messages. The
// rule is that of decode (residual.cuh).
#pragma once

#include "prefill_rows.cuh"

namespace kccl::decode {

// Tells whether the model has lanes outside this block's lane group (the blocks that share a
// residual), in other lane groups or on other ranks.
template <class S>
constexpr bool kHasOthers = S::kNumLanes > Shape<S>::kLanesPerGroup;

template <class S>
KCCL_DECODE Module rule_of(const Task& task, uint32_t module) {
    const auto* const layers = reinterpret_cast<const Layer*>(task.layers);
    return mem::load_plain(
        rule_of_module<S>(layers[module / S::kNumModules], module % S::kNumModules));
}
template <class S>
KCCL_DECODE bool blocks(const Module& rule) {
    return S::kHasBlocking && kHasOthers<S> && rule.is_blocking != 0;
}
template <class S>
KCCL_DECODE bool receives(const Module& rule) {
    return S::kHasDelayed && kHasOthers<S> && rule.is_blocking == 0 && rule.receives >= 0;
}

template <class S>
KCCL_DECODE auto* message_at(PrefillConsumer<S>& consumer, int rank, uint32_t index) {
    using Type = typename ChunkLayout<S>::Sent::Type;
    return reinterpret_cast<Type*>(consumer.in_exchange_buffer(rank, ChunkLayout<S>::kMessages)) +
           uint64_t{consumer.squad()} * ChunkLayout<S>::kNumMessages + index;
}

// Returns the sum of the float4s of all lanes, from the first lane to the last. Those of the lane
// group's own lanes, which begin with lane `first`, are taken from `own`, or left out if
// leaves_own.
template <class S>
KCCL_DECODE Float4 add_lanes(const Float4 (&float4s)[S::kNumLanes],
                             const Float4 (&own)[Shape<S>::kLanesPerGroup], uint32_t first,
                             bool leaves_own) {
    Float4 total = {};
    bool is_first = true;
    KCCL_UNROLL
    for (uint32_t lane = 0; lane < S::kNumLanes; ++lane) {
        const bool is_own = lane - first < Shape<S>::kLanesPerGroup;
        Float4 part = float4s[lane];
        KCCL_UNROLL
        for (uint32_t i = 0; i < Shape<S>::kLanesPerGroup; ++i) {
            if (lane == first + i) part = own[i];
        }
        if (is_own && leaves_own) continue;
        add_lane(&total, part, is_first);
        is_first = false;
    }
    return total;
}

// The messages of all lanes for one float4 of the residual. A message is a module's output of one
// lane, which the other lanes add.
template <class S>
struct Messages {
    typename ChunkLayout<S>::Sent::Type of_lane[S::kNumLanes];
};

// Returns the messages of all lanes for float4 `index4` of position `number`. Those of the lane
// group's own lanes are loaded too, and not used: a condition would make each load wait for the one
// before.
template <class S>
KCCL_DECODE Messages<S> load_messages(PrefillConsumer<S>& consumer, uint32_t module,
                                      uint32_t index4, uint32_t number) {
    Messages<S> messages = {};
    if (!kHasOthers<S>) return messages;
    const auto* const first = message_at(consumer, consumer.comm().rank,
                                         ChunkLayout<S>::message_at(module, 0, index4, number));
    KCCL_UNROLL
    for (uint32_t lane = 0; lane < S::kNumLanes; ++lane) {
        messages.of_lane[lane] =
            mem::load_plain(first + uint64_t{lane} * ChunkLayout<S>::kHiddenFloat4s);
    }
    return messages;
}

// Returns the sum over all lanes: of the messages of lanes of other lane groups and ranks, and of
// the outputs `own` of the lane group's own lanes. These are left out if leaves_own.
template <class S>
KCCL_DECODE Float4 add_messages(PrefillConsumer<S>& consumer, const Messages<S>& messages,
                                const Float4 (&own)[Shape<S>::kLanesPerGroup], bool leaves_own) {
    Float4 float4s[S::kNumLanes];
    KCCL_UNROLL
    for (uint32_t lane = 0; lane < S::kNumLanes; ++lane) {
        float4s[lane] = ChunkLayout<S>::Sent::unpack(messages.of_lane[lane]);
    }
    return add_lanes<S>(float4s, own, consumer.first_lane(), leaves_own);
}

// Sends a module's sums of some row tiles, in shared().totals, to all ranks: stores them as
// messages in their exchange buffers. finish() announces them later.
template <class S>
KCCL_DECODE void send_messages(PrefillConsumer<S>& consumer, uint32_t module, const Cut& tiles) {
    using C = ChunkLayout<S>;
    constexpr uint32_t kLanes = Shape<S>::kLanesPerGroup;
    for_each_row(
        consumer, tiles.num, kTileFloat4s, [&](uint32_t tile, uint32_t number, uint32_t i) {
            const uint32_t index4 = (tiles.first + tile) * kTileFloat4s + i;
            for (uint32_t lane = 0; lane < kLanes; ++lane) {
                const auto sent = C::Sent::pack(
                    as_message<S>(total_of(consumer, tile * kLanes + lane, number, i)));
                const uint32_t index =
                    C::message_at(module, consumer.first_lane() + lane, index4, number);
                for (uint32_t k = 1; k <= S::kWorldSize; ++k) {
                    const uint32_t rank = (consumer.comm().rank + k) % S::kWorldSize;
                    mem::store_plain(message_at(consumer, static_cast<int>(rank), index), sent);
                }
            }
        });
}

// What add_to_rows() loads for a float4 of the residual: its old value, the next norm's weights,
// and the messages of all lanes.
template <class S>
struct Terms {
    Float4 x;
    Float4 norm;
    Messages<S> landed;
};

// Adds a module's sums of some row tiles, in shared().totals, to their rows of the residual, and
// stages the new residual for NEXT, the first product of the next module. If TAKES_MESSAGES, also
// adds the messages of module `sent_by`.
template <bool TAKES_MESSAGES, auto NEXT, class S>
KCCL_DECODE void add_to_rows(PrefillConsumer<S>& consumer, uint32_t module, const Cut& tiles,
                             bool is_blocking, float own_scale, uint32_t sent_by) {
    constexpr uint32_t kLanes = Shape<S>::kLanesPerGroup;
    // Whether the product has added up all lanes (kAddsLanes).
    constexpr bool kAreAdded = kHasSquads<S> && kLanes > 1;
    const auto load = [&](uint32_t tile, uint32_t number, uint32_t i) {
        const uint32_t index4 = (tiles.first + tile) * kTileFloat4s + i;
        Terms<S> terms = {mem::load_plain(residual_at(consumer, index4, number)),
                          norm_of(consumer, module + 1, index4),
                          {}};
        if (TAKES_MESSAGES) terms.landed = load_messages(consumer, sent_by, index4, number);
        return terms;
    };
    const auto use = [&](uint32_t tile, uint32_t number, uint32_t i, const Terms<S>& terms) {
        const uint32_t index4 = (tiles.first + tile) * kTileFloat4s + i;
        Float4 x = terms.x;
        Float4 own[kLanes] = {};
        if (kAreAdded) {
            own[0] = total_of(consumer, tile, number, i);
        } else if (is_blocking) {
            KCCL_UNROLL
            for (uint32_t lane = 0; lane < kLanes; ++lane) {
                own[lane] = as_message<S>(total_of(consumer, tile * kLanes + lane, number, i));
            }
        } else {
            const Float4 output = total_of(consumer, tile * kLanes, number, i);
            KCCL_UNROLL
            for (int j = 0; j < 4; ++j) x.value[j] += own_scale * output.value[j];
        }
        if (TAKES_MESSAGES) {
            Float4 landed = own[0];
            if (!kAreAdded) landed = add_messages(consumer, terms.landed, own, !is_blocking);
            if (is_blocking) landed = plus_biases<S>(consumer.task(), module, index4, landed);
            KCCL_UNROLL
            for (int j = 0; j < 4; ++j) x.value[j] += landed.value[j];
        }
        mem::store_plain(residual_at(consumer, index4, number), x);
        stage_normed<NEXT>(consumer, terms.norm, index4, number, x);
    };
    // The thread loads the terms of kAtOnce float4s before it uses any of them.
    constexpr uint32_t kAtOnce = 2, kEach = S::kChunk * kTileFloat4s;
    const uint32_t num = tiles.num * kEach;
    for (uint32_t first = consumer.index(); first < num;
         first += kAtOnce * PrefillConsumer<S>::kThreads) {
        const auto index_of = [&](uint32_t k) { return first + k * PrefillConsumer<S>::kThreads; };
        Terms<S> terms[kAtOnce];
        KCCL_UNROLL
        for (uint32_t k = 0; k < kAtOnce; ++k) {
            // Behind the last float4 the thread loads its first one again, and does not use it: a
            // condition would make each load wait for the one before.
            const uint32_t i = index_of(k) < num ? index_of(k) : first;
            terms[k] = load(i / kEach, i % kEach / kTileFloat4s, i % kTileFloat4s);
        }
        KCCL_UNROLL
        for (uint32_t k = 0; k < kAtOnce; ++k) {
            const uint32_t i = index_of(k);
            if (i < num) use(i / kEach, i % kEach / kTileFloat4s, i % kTileFloat4s, terms[k]);
        }
    }
}

// How the module that op OP ends adds its sums to the residual.
template <uint32_t OP, class S>
class ModuleEnd {
  public:
    using C = ChunkLayout<S>;
    static_assert(!kHasSquads<S> || !S::kHasBlocking || !kHasOthers<S>,
                  "totals of a round are not kept until other lanes' messages are there");

    KCCL_DECODE ModuleEnd(PrefillConsumer<S>& consumer, const PromptChunk& chunk, uint32_t layer)
        : consumer_(consumer),
          chunk_(chunk),
          layer_(layer),
          module_(S::kNumModules * layer + module_of_op<S>(OP)),
          rule_(rule_of<S>(consumer.task(), module_)),
          is_blocking_(S::kHasBlocking && rule_.is_blocking != 0),
          sends_(kHasOthers<S> && (is_blocking_ || rule_.sends != 0)) {}

    // Adds a round's sums in shared().totals to the residual, and sends the module's messages.
    // Called by all consumer warps. Returns false if the producer warp has given up.
    KCCL_DECODE bool add(const Cut& tiles) {
        constexpr auto kNext = next_product<S>(OP + 1);
        if (sends_) send_messages(consumer_, module_, tiles);
        if (blocks<S>(rule_)) {
            consumer_.finish(C::number_of(chunk_.number, layer_, OP, Step::kHalf), true);
            if (!consumer_.is_ready()) return false;
        }
        if (is_blocking_) {
            add_to_rows<true, kNext>(consumer_, module_, tiles, true, rule_.own_scale, module_);
        } else if (S::kHasDelayed && rule_.receives >= 0) {
            add_to_rows<true, kNext>(consumer_, module_, tiles, false, rule_.own_scale,
                                     static_cast<uint32_t>(rule_.receives));
        } else {
            add_to_rows<false, kNext>(consumer_, module_, tiles, false, rule_.own_scale, 0);
        }
        return true;
    }

    // Announces the op's last step, when all rounds have been added.
    KCCL_DECODE void announce() {
        consumer_.finish(C::number_of(chunk_.number, layer_, OP, Step::kDone), sends_);
    }

  private:
    PrefillConsumer<S>& consumer_;
    const PromptChunk& chunk_;
    const uint32_t layer_;
    const uint32_t module_;  // counted over all layers
    const Module rule_;
    const bool is_blocking_;
    const bool sends_;
};

}  // namespace kccl::decode
