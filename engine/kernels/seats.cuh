// Seats: a kernel with S::kHasSeats runs up to S::kColumns requests at the same time, one in each
// column. A launch is a round: its requests are the same from its first token step to its last one,
// and each token step runs one position of each of them. When a request ends, or when the host asks
// for it, the round ends. Requests join and leave between rounds. A round also ends when a request
// with a grammar has no mask yet. Rounds leave that request out until it has its mask (mask.cuh).
//
// A request's position does not depend on the others', nor does its slot of the KV cache, nor how
// its tokens are chosen. All this is in a task of its own (Task.seats). Because a column's bits do
// not depend on the other columns (columns.cuh), each request has the tokens that it has alone.
//
// In such a kernel, what other kernels call the position of column 0 is the number of the token
// step in the round, from 0.
#pragma once

#include "task.cuh"

namespace kccl::decode {

// Returns the task of the request that a column runs. Without seats, that is the kernel's own task.
template <class S>
KCCL_DECODE const Task& task_of(const Task& task, [[maybe_unused]] uint32_t column) {
    if constexpr (S::kHasSeats) {
        // The host writes the tasks before the launch, so plain loads find them.
        return reinterpret_cast<const Task*>(task.seats)[column];
    } else {
        return task;
    }
}

// Returns the position that a column runs. position: that of column 0; with seats, the number of
// the token step.
template <class S>
KCCL_DECODE uint32_t position_of(const Task& task, uint32_t position, uint32_t column) {
    if constexpr (S::kHasSeats) return task_of<S>(task, column).start + position;
    return position + column;
}

}  // namespace kccl::decode
