// Recognises polls: loads in a loop that ends when one of them returns what the thread waits for. A
// thread whose poll was in vain does not run until something is stored to a word that it has
// loaded.
#include <algorithm>

#include "machine.h"

namespace kccl::sim {
namespace {

// How many of the last noted words look_again() compares. A wait that does not call poll_pause()
// loads few words, again and again.
constexpr size_t kRemembered = 4;

}  // namespace

void Machine::take_loads() {
    Fiber& mine = *current_;
    memory.settle(mine.knowledge, mine.polled, mine.num_settled, true);
    // The words stay in `polled`: between a poll's loads and its poll_pause() there may be a
    // barrier or vote, behind which the thread still waits for these words.
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

// Called at the pause of a poll, which has not found what the thread waits for. Lets the thread
// poll again when something is stored to one of the words that it has loaded, or at once if a load
// returned an old value or such a store has come meanwhile.
void Machine::settle_poll() {
    Fiber& mine = *current_;
    count_step();
    memory.settle(mine.knowledge, mine.polled, mine.num_settled, false);
    bool may_see_more = mine.saw_old;
    for (const Look& look : mine.polled) {
        // Another thread may have stored to the word since this thread loaded it.
        may_see_more = may_see_more || look.granule->num_stores != look.num_stores;
    }
    // If this thread polls again at once, so do all polling threads of its warp.
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
