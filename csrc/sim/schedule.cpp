#include "schedule.h"

namespace kccl::sim {

void Ready::clear() {
    for (Queue& queue : queues_) {
        queue.fibers.clear();
        queue.first = 0;
    }
    levels_ = 0;
}

void Ready::push(Fiber* fiber, uint32_t level) {
    Queue& queue = queues_[level];
    // pop_oldest() leaves unused elements at the queue's front. They are erased now and then, so
    // that the queue does not grow without end.
    if (queue.first > 1024 && queue.first * 2 > queue.fibers.size()) {
        queue.fibers.erase(queue.fibers.begin(),
                           queue.fibers.begin() + static_cast<ptrdiff_t>(queue.first));
        queue.first = 0;
    }
    queue.fibers.push_back(fiber);
    levels_ |= uint64_t{1} << level;
}

Fiber* Ready::took(Queue& queue, Fiber* fiber) {
    if (queue.first == queue.fibers.size()) {
        queue.fibers.clear();
        queue.first = 0;
        levels_ &= ~(uint64_t{1} << highest());
    }
    return fiber;
}

Fiber* Ready::pop_oldest() {
    Queue& queue = queues_[highest()];
    return took(queue, queue.fibers[queue.first++]);
}

Fiber* Ready::pop_any(Random& random) {
    Queue& queue = queues_[highest()];
    const auto count = static_cast<uint32_t>(queue.fibers.size() - queue.first);
    const size_t index = queue.first + random.below(count);
    Fiber* const fiber = queue.fibers[index];
    queue.fibers[index] = queue.fibers.back();
    queue.fibers.pop_back();
    return took(queue, fiber);
}

const std::vector<Fiber*>& Ready::at_highest(size_t* first) const {
    const Queue& queue = queues_[highest()];
    *first = queue.first;
    return queue.fibers;
}

void Ready::remove_at_highest(size_t index) {
    Queue& queue = queues_[highest()];
    queue.fibers.erase(queue.fibers.begin() + static_cast<ptrdiff_t>(index));
    took(queue, nullptr);
}

}  // namespace kccl::sim
