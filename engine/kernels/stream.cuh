// The stages of a block's weights in a token step, and the producer warp of a kernel with a ring of
// weights in shared memory. A stage is what one copy moves into the ring. The producer warp copies
// the stages ahead of their use, through all token steps. Only the ring's size and a bound on
// stages in flight hold it back. In a kernel where nothing overlaps, a stage is copied only when
// all consumer warps wait for it.
#pragma once

#include "product.cuh"

namespace kccl::decode {

// Calls push(bytes, product, is_first) for each stage of a block's token step, in order. is_first:
// whether it is the product's first stage. Returns false as soon as push() does, and true in the
// end. A stage has stage_steps() steps, or as many as are left of the product. In the head, no
// stage crosses from kHeadTiles row tiles into the next ones.
template <class S, class Push>
KCCL_DECODE bool for_each_stage(uint32_t block, bool has_head, Push push) {
    constexpr uint32_t kOfHead = Shape<S>::kHeadTiles * Shape<S>::Head::kSteps;
    const uint32_t num = kTurnsOfLayers<S> + (has_head ? 1 : 0);
    for (uint32_t i = 0; i < num; ++i) {
        const bool is_head = i == kTurnsOfLayers<S>;
        const Product<S> product = is_head ? Product<S>::kHead : turn_at<S>(i).product;
        uint32_t steps = steps_of_product<S>(block, product).num;
        const uint32_t most = stage_steps<S>(product);
        bool is_first = true;
        while (steps > 0) {
            uint32_t part = is_head && steps > kOfHead ? kOfHead : steps;
            steps -= part;
            while (part > 0) {
                const uint32_t now = part < most ? part : most;
                if (!push(now * step_bytes<S>(product), product, is_first)) return false;
                is_first = false;
                part -= now;
            }
        }
    }
    return true;
}

// Runs the producer warp: copies the stages of all token steps, and watches over the waits of the
// other warps. Returns when the consumer warps have ended. Called by all threads of the warp.
template <class S>
KCCL_DECODE void stream(const DeviceComm& comm, const Task& task, Shared<S>& shared) {
    const uint32_t block = platform::block_in_grid();
    Producer<WeightRing<S>> producer(shared.ring, comm);
    Watch<S> watch(comm, task, &shared.gave_up);
    const auto* const begin =
        reinterpret_cast<const uint8_t*>(task.weights) + Shape<S>::stream_of(block) * kUnitBytes<S>;
    const uint8_t* from = begin;
    StageTrace<S> trace(task);
    // How many stages of the current product have been requested so far.
    uint32_t num_asked = 0;
    const auto try_push = [&](uint32_t num_bytes, Product<S> product) {
        // A copy is urgent when the warps have freed two stages of its product: then they multiply
        // it, and wait only for weights. Otherwise they may be in an exchange, which copies in
        // flight would delay. One freed stage is no sign, because warps load it before their vector
        // has come (LoadFirst).
        constexpr uint32_t kStages = num_stages<S>();
        const bool is_urgent = num_asked > kStages + 1 ||
                               (num_asked > 1 && producer.has_free_stages(kStages + 2 - num_asked));
        const uint32_t bound = is_urgent ? S::kUrgentInFlight : S::kInFlight;
        if constexpr (S::kTraces) {
            // A kernel that traces checks here what try_push() would wait for. Such a wait may
            // suspend the warp until a barrier's phase ends, and the warp would record landed
            // stages late.
            const uint32_t flying = producer.num_in_flight();
            trace.see(flying);
            if (flying >= bound || !producer.has_free_stages(1)) return false;
        }
        const bool is_pinned =
            (S::kAblated / kKcclDecodePinned >> static_cast<uint32_t>(product) & 1u) != 0;
        const uint32_t copied = (S::kAblated & kKcclDecodeNoWeights) != 0 ? 16 : num_bytes;
        return producer.try_push(is_pinned ? begin : from, copied, bound);
    };
    uint32_t asked_parity = 0;
    const auto is_asked_for = [&] {
        return S::kOverlaps ||
               !platform::warp_any(!mem::has_completed_now(&shared.asked, asked_parity));
    };
    const auto push = [&](uint32_t num_bytes, Product<S> product, bool is_first) {
        if (is_first) num_asked = 0;
        while (!is_asked_for() || !try_push(num_bytes, product)) {
            if (platform::warp_any(mem::has_completed_now(&shared.ended, 0))) return false;
            watch.look();
            mem::poll_pause();
        }
        from += num_bytes;
        ++num_asked;
        asked_parity ^= 1u;
        if constexpr (S::kTraces) trace.ask();
        return true;
    };
    uint32_t num_columns = 1;
    for (uint32_t position = task.start;; position += num_columns) {
        num_columns = columns_of<S>(task, position);
        from = begin;
        const bool has_head = wants_head(task, position + num_columns - 1);
        if (!for_each_stage<S>(block, has_head, push)) break;
        if constexpr (S::kTraces) trace.end_token_step();
    }
    producer.drain();
}

}  // namespace kccl::decode
