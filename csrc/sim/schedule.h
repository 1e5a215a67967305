// Chooses which thread moves next.
#pragma once

#include <stddef.h>
#include <stdint.h>

#include <vector>

#include "choice.h"
#include "types.h"

namespace kccl::sim {

struct Fiber;

// The parameters that a seed gives to the requested schedule.
struct Style {
    KcclSimSchedule schedule = kKcclSimRandom;
    uint32_t switch_one_in = 1;  // how often a thread is interrupted at an access
    int32_t slow_rank = -1;
    int32_t slow_block = -1;     // block of slow_rank
    uint64_t stopped_at = 0;     // the thread that moves at this step is stopped
    uint32_t change_one_in = 0;  // kKcclSimPriority: how often a warp's priority changes
};

// The threads that can move, by level. Those of the highest level go first.
class Ready {
  public:
    static constexpr uint32_t kLevels = 64;

    void clear();
    bool is_empty() const { return levels_ == 0; }
    uint32_t highest() const { return 63 - static_cast<uint32_t>(__builtin_clzll(levels_)); }
    void push(Fiber* fiber, uint32_t level);
    // Returns a thread of the highest level: the one that has waited longest, or any.
    Fiber* pop_oldest();
    Fiber* pop_any(Random& random);
    // Returns the threads of the highest level, oldest first, from position *first on; for choices
    // by tape.
    const std::vector<Fiber*>& at_highest(size_t* first) const;
    void remove_at_highest(size_t index);

  private:
    struct Queue {
        std::vector<Fiber*> fibers;
        size_t first = 0;
    };
    Fiber* took(Queue& queue, Fiber* fiber);
    Queue queues_[kLevels];
    uint64_t levels_ = 0;
};

}  // namespace kccl::sim
