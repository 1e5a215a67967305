// The threads that can run, and how the machine chooses among them (moves.cpp).
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <vector>

#include "choice.h"
#include "types.h"

namespace kccl::sim {

struct Fiber;

// The schedule of a run, and its parameters, which the seed chooses.
struct Style {
    KcclSimSchedule schedule = kKcclSimRandom;
    uint32_t switch_one_in = 1;  // a thread is interrupted at one access in so many
    int32_t slow_rank = -1;      // kKcclSimSlowRank and kKcclSimSlowBlock
    int32_t slow_block = -1;     // kKcclSimSlowBlock: this block of slow_rank
    uint64_t stopped_at = 0;     // kKcclSimStoppedThread: stops the thread that makes this step
    uint32_t change_one_in = 0;  // kKcclSimPriority: a warp's level changes at one step in so many
};

// The threads that can run, in a queue for each level. Threads of the highest level run first.
class Ready {
  public:
    static constexpr uint32_t kLevels = 64;

    void clear();
    bool is_empty() const { return levels_ == 0; }
    uint32_t highest() const { return 63 - static_cast<uint32_t>(__builtin_clzll(levels_)); }
    void push(Fiber* fiber, uint32_t level);
    // Removes and returns a thread of the highest level: the one that has waited longest, or any.
    Fiber* pop_oldest();
    Fiber* pop_any(Random& random);
    // For an exhaustive search: returns the threads of the highest level, from position *first on,
    // the one that has waited longest first. remove_at_highest() removes the one at this position.
    const std::vector<Fiber*>& at_highest(size_t* first) const;
    void remove_at_highest(size_t index);

  private:
    struct Queue {
        std::vector<Fiber*> fibers;
        size_t first = 0;  // position of the oldest; those before it have been removed
    };
    // Called after a thread has been removed from the queue of the highest level. Returns it.
    Fiber* took(Queue& queue, Fiber* fiber);
    Queue queues_[kLevels];
    uint64_t levels_ = 0;  // the levels that have threads, a bit each
};

}  // namespace kccl::sim
