#include "clock.h"

#include <algorithm>

namespace kccl::sim {
namespace {

// Tells whether counters[i] is above both others[i] and `all` for some i; a missing others[i]
// counts as 0. The loop does not stop at the first such i, so that compilers make vector
// instructions of it: runs of many threads make this comparison often.
bool has_more(const std::vector<uint32_t>& counters, const std::vector<uint32_t>& others,
              uint32_t all) {
    const size_t common = std::min(counters.size(), others.size());
    uint32_t more = 0;
    for (size_t i = 0; i < common; ++i) more |= counters[i] > std::max(others[i], all) ? 1u : 0u;
    for (size_t i = common; i < counters.size(); ++i) more |= counters[i] > all ? 1u : 0u;
    return more != 0;
}

}  // namespace

std::vector<Clock::Part>::iterator Clock::lower_bound(uint32_t slot) {
    return std::lower_bound(each_.begin(), each_.end(), slot,
                            [](const Part& part, uint32_t other) { return part.slot < other; });
}

const Clock::Part* Clock::find(uint32_t slot) const {
    for (const Part& part : each_) {
        if (part.slot >= slot) return part.slot == slot ? &part : nullptr;
    }
    return nullptr;
}

std::vector<uint32_t>& Clock::edit_counters(Part& part, size_t size) {
    if (!part.each) {
        part.each = Ref<Counters>(new Counters);
    } else if (part.each->refs > 1) {
        auto* copy = new Counters;
        copy->counters = part.each->counters;
        part.each = Ref<Counters>(copy);
    }
    std::vector<uint32_t>& counters = part.each->counters;
    if (counters.size() < size) counters.resize(size);
    return counters;
}

// Makes all_ at least num_slots long. Calls reserve(), because resize() alone may take twice as
// much memory, and there are hundreds of thousands of clocks.
void Clock::make_room(size_t num_slots) {
    if (num_slots <= all_.size()) return;
    all_.reserve(num_slots);
    all_.resize(num_slots);
}

void Clock::add(Event event) {
    if (knows(event)) return;
    auto at = lower_bound(event.agent.slot);
    if (at == each_.end() || at->slot != event.agent.slot) {
        at = each_.insert(at, {event.agent.slot, {}});
    }
    edit_counters(*at, event.agent.thread + 1)[event.agent.thread] = event.counter;
}

void Clock::add_block(uint32_t slot, uint32_t counter) {
    make_room(slot + 1);
    if (counter <= all_[slot]) return;
    all_[slot] = counter;
    const auto at = lower_bound(slot);
    if (at == each_.end() || at->slot != slot) return;
    const std::vector<uint32_t>& counters = at->each->counters;
    const bool is_covered = std::all_of(counters.begin(), counters.end(),
                                        [counter](uint32_t own) { return own <= counter; });
    if (is_covered) each_.erase(at);
}

void Clock::join(const Clock& other) {
    make_room(other.all_.size());
    for (size_t slot = 0; slot < other.all_.size(); ++slot) {
        all_[slot] = std::max(all_[slot], other.all_[slot]);
    }
    for (const Part& theirs : other.each_) {
        const auto at = lower_bound(theirs.slot);
        if (at == each_.end() || at->slot != theirs.slot) {
            each_.insert(at, theirs);
            continue;
        }
        if (theirs.each.get() == at->each.get()) continue;
        const uint32_t all = theirs.slot < all_.size() ? all_[theirs.slot] : 0;
        const std::vector<uint32_t>& news = theirs.each->counters;
        if (!has_more(news, at->each->counters, all)) continue;
        // If the other clock's part has all that this clock knows of the slot, this clock shares
        // that part. The next join then finds the same pointer, and compares no numbers.
        if (!has_more(at->each->counters, news, all)) {
            at->each = theirs.each;
            continue;
        }
        std::vector<uint32_t>& counters = edit_counters(*at, news.size());
        for (size_t i = 0; i < news.size(); ++i) counters[i] = std::max(counters[i], news[i]);
    }
}

Clock& edit(ClockRef& ref) {
    if (!ref) {
        ref = ClockRef(new Clock);
    } else if (ref->refs > 1) {
        auto* copy = new Clock(*ref);
        copy->refs = 0;
        ref = ClockRef(copy);
    }
    return *ref;
}

void join(ClockRef& into, const ClockRef& other) {
    if (!other || into.get() == other.get()) return;
    if (!into) {
        into = other;
        return;
    }
    edit(into).join(*other);
}

void JoinedOften::join_to(ClockRef& into) {
    Case& known = known_[reinterpret_cast<uintptr_t>(into.get()) / sizeof(Clock) % known_.size()];
    if (!known.after || into.get() != known.before.get()) {
        known.before = into;
        join(into, clock_);
        known.after = into;
    }
    into = known.after;
}

}  // namespace kccl::sim
