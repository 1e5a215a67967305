// Polls: loads in a loop that ends when one of them finds what the thread waits for.
#include <algorithm>

#include "machine.h"

namespace kccl::sim {
namespace {

// How many of the last words look_again() compares. A wait that does not pause loads few words,
// again and again.
constexpr size_t kRemembered = 4;

}  // namespace

void Machine::take_loads() {
    Fiber& mine = *current_;
    memory.settle(mine.knowledge, mine.polled, mine.num_settled, true);
    // The words stay in `polled`, because a poll may include a barrier or vote before it pauses,
    // and still waits for them.
    mine.num_settled = mine.polled.size();
}

void Machine::end_poll() {
    take_loads();
    begin_poll(*current_);
}

void Machine::begin_poll(Fiber& fiber) {
    fiber.polled.clear();
    fiber.num_settled = 0;
    fiber.saw_old = false;
    fiber.woken_before = fiber.warp->woken;
}

void Machine::look_again(Granule& granule) {
    std::vector<Look>& polled = current_->polled;
    const size_t first = std::max(current_->num_settled, polled.size() - kRemembered);
    for (size_t i = first; i < polled.size(); ++i) {
        if (polled[i].granule == &granule) return;
    }
    polled.push_back({&granule, granule.num_stores});
}

// Called when a poll has not found what it waited for. The thread polls again when one of the words
// that it has loaded is stored to, or at once if a load returned an old value.
void Machine::settle_poll() {
    Fiber& mine = *current_;
    count_step();
    memory.settle(mine.knowledge, mine.polled, mine.num_settled, false);
    bool may_see_more = mine.saw_old;
    for (const Look& look : mine.polled) {
        // Another thread, which moved in between, has stored to it since.
        may_see_more = may_see_more || look.granule->num_stores != look.num_stores;
    }
    // All threads of a warp look again together.
    if (may_see_more) {
        wake(*mine.warp);
    } else if (mine.woken_before != mine.warp->woken) {
        may_see_more = true;
    } else {
        for (const Look& look : mine.polled) {
            std::vector<uint32_t>& waiters = look.granule->waiters;
            if (waiters.empty() || waiters.back() != mine.warp->index) {
                waiters.push_back(mine.warp->index);
            }
        }
    }
    begin_poll(mine);
    yield_as(may_see_more || !findings.empty() ? Fiber::kReady : Fiber::kPolling);
    mine.woken_before = mine.warp->woken;
    leave_if_found();
}

}  // namespace kccl::sim
