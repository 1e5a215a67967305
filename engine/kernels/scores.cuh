// Computes an id's score before noise: its logit, plus its bias, less the penalties if the text has
// the id. A block keeps the data of those ids whose rows of the head it has.
#pragma once

#include "head.cuh"

namespace kccl::decode {

// Sets *row to the id's row of the head, counted among this rank's rows. Returns whether this block
// has that row. If another rank has it, *row means nothing.
template <class S>
KCCL_DECODE bool finds_row(const ConsumerWarp<S>& consumer, int32_t id, uint32_t* row) {
    const Cut tiles = Shape<S>::head_tiles_of(consumer.block());
    *row = static_cast<uint32_t>(id) - Shape<S>::first_head_row_of(consumer.comm().rank);
    return *row - tiles.first * kTileRows < tiles.num * kTileRows;
}

// ---- What the text has --------------------------------------------------------------------------

// Marks an id that the text has, by the request's number in Task.marks. Does nothing if another
// block has the id's row of the head.
template <class S>
KCCL_DECODE void mark(const ConsumerWarp<S>& consumer, const Task& task, int32_t id) {
    uint32_t row = 0;
    if (task.marks == 0 || !finds_row(consumer, id, &row)) return;
    mem::store<mem::Order::kRelaxed, mem::Scope::kBlock>(
        reinterpret_cast<uint32_t*>(task.marks) + row, task.number);
}

// Counts an id of the answer in Task.counts. Does nothing if another block has the id's row of the
// head. The same thread must make all calls. All warps must meet before one reads the counts.
template <class S>
KCCL_DECODE void count(const ConsumerWarp<S>& consumer, const Task& task, int32_t id) {
    uint32_t row = 0;
    if (task.counts == 0 || !finds_row(consumer, id, &row)) return;
    auto* const counted = reinterpret_cast<uint32_t*>(task.counts) + row;
    mem::store_plain(counted, mem::load_plain(counted) + 1);
}

// Marks the ids that the request begins with, and clears the counts, as far as this block has these
// ids' rows. Called by all consumer warps, which meet before the first id is counted.
template <class S>
KCCL_DECODE void begin_text(const ConsumerWarp<S>& consumer, const Task& task) {
    const auto* const ids = reinterpret_cast<const int32_t*>(task.ids);
    const uint32_t first = consumer.warp_index() * platform::kWarpSize + consumer.thread();
    for (uint32_t i = first; i < task.num_ids; i += Shape<S>::kConsumerThreads) {
        mark(consumer, task, mem::load_plain(ids + i));
    }
    if (task.counts == 0) return;
    const Cut tiles = Shape<S>::head_tiles_of(consumer.block());
    for (uint32_t i = first; i < tiles.num * kTileRows; i += Shape<S>::kConsumerThreads) {
        mem::store_plain(reinterpret_cast<uint32_t*>(task.counts) + tiles.first * kTileRows + i,
                         0u);
    }
}

// Does so for the requests that begin. A request with a seat may have begun in an earlier round,
// and one with drafts in another kernel (leaving.cuh).
template <class S>
KCCL_DECODE void begin_texts(const ConsumerWarp<S>& consumer) {
    if constexpr (S::kHasSeats) {
        for (uint32_t i = 0; i < consumer.task().num_seats; ++i) {
            const Task& task = task_of<S>(consumer.task(), i);
            if (task.start < task.num_ids) begin_text(consumer, task);
        }
    } else {
        if (!goes_on(consumer.task())) begin_text(consumer, consumer.task());
    }
}

// Returns four bits: bit i is set if the text has the i-th id of float4 `index4` of this rank's
// logits. Returns 0 if the request has no repetition penalty.
KCCL_DECODE uint32_t seen_of(const Task& task, uint32_t index4) {
    if (task.marks == 0) return 0;
    const Float4 marks = load_float4(task.marks, index4);
    uint32_t seen = 0;
    KCCL_UNROLL
    for (int i = 0; i < 4; ++i) {
        const bool is_seen = platform::bit_cast<uint32_t>(marks.value[i]) == task.number;
        seen |= is_seen ? 1u << i : 0;
    }
    return seen;
}

// ---- Scores -------------------------------------------------------------------------------------

// Tells whether a score needs counts or biases, which only the block with the id's row has.
KCCL_DECODE bool needs_row(const Task& task) { return task.counts != 0 || task.logit_biases != 0; }

// Returns an id's score before noise. logit: the id's logit, plus its bias if it has one. is_seen:
// whether the text has the id. num: how often the answer has it.
KCCL_DECODE double score_of(const Task& task, double logit, bool is_seen, uint32_t num) {
    double score = logit;
    if (is_seen) {
        const double penalty = task.sampling.repetition_penalty;
        score = score > 0 ? score / penalty : score * penalty;
    }
    if (num != 0) {
        // mem::product() rounds the product before the sum, as sample.py does. Otherwise the
        // compiler might fuse the two.
        score -=
            mem::product(task.frequency_penalty, static_cast<double>(num)) + task.presence_penalty;
    }
    return task.sampling.temperature > 0 ? score / task.sampling.temperature : score;
}

// Returns the score of the id whose row of the head is `row`, counted among this rank's rows. This
// block must have the row.
KCCL_DECODE double score_of_row(const Task& task, float logit, bool is_seen, uint32_t row) {
    double biased = double{logit};
    uint32_t num = 0;
    if (task.logit_biases != 0) {
        biased += mem::load_plain(reinterpret_cast<const double*>(task.logit_biases) + row);
    }
    if (task.counts != 0) {
        num = mem::load_plain(reinterpret_cast<const uint32_t*>(task.counts) + row);
    }
    return score_of(task, biased, is_seen, num);
}

}  // namespace kccl::decode
