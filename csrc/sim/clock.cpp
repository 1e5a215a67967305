#include "clock.h"

#include <algorithm>

namespace kccl::sim {

Clock::Part& Clock::part(uint32_t slot) {
    if (slot >= parts_.size()) parts_.resize(slot + 1);
    return parts_[slot];
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

void Clock::add(Event event) {
    if (knows(event)) return;
    edit_counters(part(event.agent.slot), event.agent.thread + 1)[event.agent.thread] =
        event.counter;
}

void Clock::add_block(uint32_t slot, uint32_t counter) {
    Part& mine = part(slot);
    if (counter <= mine.all) return;
    mine.all = counter;
    if (!mine.each) return;
    const std::vector<uint32_t>& counters = mine.each->counters;
    const bool is_covered = std::all_of(counters.begin(), counters.end(),
                                        [counter](uint32_t own) { return own <= counter; });
    if (is_covered) mine.each = {};
}

void Clock::join(const Clock& other) {
    if (other.parts_.size() > parts_.size()) parts_.resize(other.parts_.size());
    for (size_t slot = 0; slot < other.parts_.size(); ++slot) {
        const Part& theirs = other.parts_[slot];
        Part& mine = parts_[slot];
        mine.all = std::max(mine.all, theirs.all);
        if (!theirs.each || theirs.each.get() == mine.each.get()) continue;
        if (!mine.each) {
            mine.each = theirs.each;
            continue;
        }
        const std::vector<uint32_t>& news = theirs.each->counters;
        const std::vector<uint32_t>& known = mine.each->counters;
        bool has_news = false;
        for (size_t i = 0; i < news.size() && !has_news; ++i) {
            has_news = news[i] > mine.all && (i >= known.size() || news[i] > known[i]);
        }
        if (!has_news) continue;
        std::vector<uint32_t>& counters = edit_counters(mine, news.size());
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

}  // namespace kccl::sim
