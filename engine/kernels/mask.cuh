// The mask of the ids that may be chosen for a position, where a request has a grammar.
//
// Each rank's host computes the mask while the token step runs. It writes the mask into its own
// memory, and then the position into the mailbox. At the end of the token step block 0 of each rank
// waits for the mask before it sends its control word. So a block that has received this control
// word finds its rank's mask. One array suffices: the host posts a mask only when it has the last
// token, and by then all blocks have copied the last mask.
#pragma once

#include "head.cuh"

namespace kccl::decode {

// Returns the number of the first word of the mask that a block copies. That word has the bit of
// the first id of the block's rows.
template <class S>
KCCL_DECODE uint32_t first_mask_word(const ConsumerWarp<S>& consumer) {
    const Cut tiles = Shape<S>::head_tiles_of(consumer.block());
    return (Shape<S>::first_head_row_of(consumer.comm().rank) + tiles.first * kTileRows) /
           kMaskBits;
}

// Copies the mask of the block's rows to shared memory, if the request has one. Called by all
// consumer warps. Returns false if a wait failed.
template <class S>
KCCL_DECODE bool fetch_mask(ConsumerWarp<S>& consumer) {
    const Task& task = consumer.task();
    if (task.mask == 0) return true;
    const Cut tiles = Shape<S>::head_tiles_of(consumer.block());
    const uint32_t first = first_mask_word(consumer);
    const uint32_t behind =
        Shape<S>::first_head_row_of(consumer.comm().rank) + (tiles.first + tiles.num) * kTileRows;
    const uint32_t num = tiles.num == 0 ? 0 : ceil_div(behind, kMaskBits) - first;
    const auto* const words = reinterpret_cast<const uint32_t*>(task.mask) + first;
    for (uint32_t i = consumer.warp_index() * platform::kWarpSize + consumer.thread(); i < num;
         i += Shape<S>::kConsumerThreads) {
        mem::store_plain(&consumer.shared().mask[i],
                         mem::load<mem::Order::kRelaxed, mem::Scope::kSystem>(words + i));
    }
    return consumer.meet();
}

// Returns four bits: bit i is set if id first_id + i may be chosen. These ids must be a float4 of
// this block's logits.
template <class S>
KCCL_DECODE uint32_t allowed_of(ConsumerWarp<S>& consumer, uint32_t first_id) {
    if (consumer.task().mask == 0) return 15;
    const uint32_t word =
        mem::load_plain(&consumer.shared().mask[first_id / kMaskBits - first_mask_word(consumer)]);
    return word >> first_id % kMaskBits & 15u;
}

// Waits until the host has written the mask of a position, or has cancelled the request. Called by
// all threads of a warp. Returns true if the host has cancelled.
template <class S>
KCCL_DECODE bool await_mask(ConsumerWarp<S>& consumer, uint32_t position) {
    auto* const mailbox = reinterpret_cast<Mailbox*>(consumer.task().mailbox);
    bool is_cancelled = false;
    consumer.await_host([&] {
        bool is_there = false;
        if (leads(warp())) {
            // The position is stored in each round of polls. The simulator counts a store as
            // progress, and so lets the kernel wait for the host program, which the simulator does
            // not see.
            mem::store<mem::Order::kRelaxed, mem::Scope::kSystem>(&mailbox->awaited, position);
            is_there =
                mem::load<mem::Order::kAcquire, mem::Scope::kSystem>(&mailbox->masked) == position;
            is_cancelled = mem::load<mem::Order::kRelaxed, mem::Scope::kSystem>(
                               &mailbox->cancelled) == consumer.task().number;
        }
        return platform::warp_any(is_there || is_cancelled);
    });
    return platform::warp_any(is_cancelled);
}

}  // namespace kccl::decode
