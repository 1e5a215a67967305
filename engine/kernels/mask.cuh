// The mask of the ids that may be chosen for a position, where a request has a grammar.
//
// Each rank's host computes the mask while the token step runs. It writes the mask into its own
// memory, and then the position into the mailbox. At the end of the token step block 0 of each rank
// waits for the mask before it sends its control word. So a block that has received this control
// word finds its rank's mask. One array suffices: the host posts a mask only when it has the last
// token, and by then all blocks have copied the last mask.
//
// With seats (seats.cuh) the other requests of the round do not wait long for a mask. Without it,
// the request has no token of this token step, and the round ends. The host leaves the request out
// of further rounds until it has the mask. Then the request runs the same position again.
#pragma once

#include "endings.cuh"

namespace kccl::decode {

// Returns the number of the first word of the mask that a block copies. That word has the bit of
// the first id of the block's rows.
template <class S>
KCCL_DECODE uint32_t first_mask_word(const ConsumerWarp<S>& consumer) {
    const Cut tiles = Shape<S>::head_tiles_of(consumer.block());
    return (Shape<S>::first_head_row_of(consumer.comm().rank) + tiles.first * kTileRows) /
           kMaskBits;
}

// Copies a request's mask of the block's rows to shared memory. Called by num_threads
// threads, of which this is number `thread`.
template <class S>
KCCL_DECODE void copy_mask(const ConsumerWarp<S>& consumer, const Task& task, uint32_t* to,
                           uint32_t thread, uint32_t num_threads) {
    const Cut tiles = Shape<S>::head_tiles_of(consumer.block());
    const uint32_t first = first_mask_word(consumer);
    const uint32_t behind =
        Shape<S>::first_head_row_of(consumer.comm().rank) + (tiles.first + tiles.num) * kTileRows;
    const uint32_t num = tiles.num == 0 ? 0 : ceil_div(behind, kMaskBits) - first;
    const auto* const words = reinterpret_cast<const uint32_t*>(task.mask) + first;
    for (uint32_t i = thread; i < num; i += num_threads) {
        mem::store_plain(to + i, mem::load<mem::Order::kRelaxed, mem::Scope::kSystem>(words + i));
    }
}

// Returns four bits: bit i is set if id first_id + i may be chosen. These ids must be a float4 of
// this block's logits. mask: what copy_mask() has copied.
template <class S>
KCCL_DECODE uint32_t allowed_of(const ConsumerWarp<S>& consumer, const Task& task,
                                const uint32_t* mask, uint32_t first_id) {
    if (task.mask == 0) return 15;
    const uint32_t word =
        mem::load_plain(mask + (first_id / kMaskBits - first_mask_word(consumer)));
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

// With seats: the nanoseconds for which a token step waits for masks. The host makes most masks in
// less than a token step.
constexpr uint64_t kMaskPatienceNs = 1000000;

// With seats: waits, at most kMaskPatienceNs, until the host has written the masks of a token step.
// Each thread waits for the mask of one column. Returns 0, kLacksMask, or kIsCancelled for the
// thread's column: bits of a control word. Called by all threads of a warp.
template <class S>
KCCL_DECODE uint32_t await_masks(ConsumerWarp<S>& consumer, uint32_t turn) {
    const bool is_used = consumer.thread() < consumer.num_columns();
    const uint32_t column = is_used ? consumer.thread() : 0;
    const Task& seat = task_of<S>(consumer.task(), column);
    uint32_t found = is_used && seat.mask != 0 ? kLacksMask : 0;
    if (!platform::warp_any(found != 0)) return 0;
    auto* const mailbox = reinterpret_cast<Mailbox*>(seat.mailbox);
    const uint32_t wanted = position_of<S>(consumer.task(), turn, column) + 1;
    const uint64_t began = mem::clock_ns();
    while (platform::warp_any(found == kLacksMask)) {
        if (found == kLacksMask) {
            if (is_asked_to_end(seat)) found = kIsCancelled;
            if (mem::load<mem::Order::kAcquire, mem::Scope::kSystem>(&mailbox->masked) == wanted) {
                found = 0;
            }
        }
        if (platform::warp_any(mem::clock_ns() - began > kMaskPatienceNs)) break;
        mem::poll_pause();
    }
    return found;
}

}  // namespace kccl::decode
