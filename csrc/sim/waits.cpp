// Notes which threads wait in which calls when no thread can move any more, for the report of a
// time-out.
#include <stdio.h>
#include <string.h>

#include <algorithm>

#include "machine.h"

namespace kccl::sim {
namespace {

bool has_failed(const Fiber& fiber) {
    const auto* state = reinterpret_cast<const KcclState*>(fiber.begun.state);
    return fiber.begun.name != nullptr && state->status != kKcclOk;
}

// Writes a call to `to` in the form "wait(peer 1, signal_id 3, wanted 1)". Leaves out addresses,
// because they tell the user nothing.
void describe(const BegunCall& begun, char* to) {
    size_t length = 0;
    const auto add = [&](const char* format, auto... values) {
        const size_t room = kKcclSimWhatBytes - length;
        const int wanted = snprintf(to + length, room, format, values...);
        length += std::min(static_cast<size_t>(wanted), room - 1);
    };
    if (begun.name == nullptr) return;
    add("%s(", begun.name);
    const char* separator = "";
    for (uint32_t i = 0; i < begun.num_arguments; ++i) {
        const KcclSimArgument& each = begun.arguments[i];
        if (strcmp(each.name, "out") == 0 || strcmp(each.name, "in") == 0) continue;
        add("%s%s %lld", separator, each.name, static_cast<long long>(each.value));
        separator = ", ";
    }
    add("%s", ")");
}

int32_t peer_of(const BegunCall& begun) {
    for (uint32_t i = 0; begun.name != nullptr && i < begun.num_arguments; ++i) {
        const KcclSimArgument& each = begun.arguments[i];
        if (strcmp(each.name, "peer") == 0) return static_cast<int32_t>(each.value);
    }
    return -1;
}

}  // namespace

// Stores in `waits` the groups of threads that wait in the same call. Does nothing if the
// communicator of a thread's call has failed: the threads wait because of that failure then, which
// the earlier notes explain.
void Machine::note_waits() {
    struct Group {
        KcclSimWait wait;
        uint64_t num_calls;
    };
    std::vector<Group> groups;
    for (const std::shared_ptr<Grid>& grid : running_) {
        for (const std::unique_ptr<Block>& block : grid->blocks) {
            const size_t first = groups.size();
            for (const Fiber* fiber : block->fibers) {
                if (has_failed(*fiber)) return;
                if (fiber->state == Fiber::kEnded) continue;
                Group mine = {};
                mine.wait.place = place(*fiber);
                mine.wait.num_threads = 1;
                describe(fiber->begun, mine.wait.what);
                const char* const name = fiber->begun.name;
                mine.wait.is_signal = name != nullptr && strcmp(name, "wait") == 0 ? 1 : 0;
                mine.wait.is_polling = fiber->state == Fiber::kPolling ? 1 : 0;
                mine.wait.peer = peer_of(fiber->begun);
                mine.wait.state = name != nullptr ? fiber->begun.state : 0;
                mine.wait.call_site = name != nullptr ? fiber->begun.site : 0;
                for (const uint32_t count : fiber->num_calls) mine.num_calls += count;
                const auto known = std::find_if(
                    groups.begin() + static_cast<ptrdiff_t>(first), groups.end(),
                    [&](const Group& other) {
                        return strcmp(other.wait.what, mine.wait.what) == 0 &&
                               (name != nullptr || other.wait.place.site == mine.wait.place.site);
                    });
                if (known == groups.end()) {
                    groups.push_back(mine);
                } else {
                    ++known->wait.num_threads;
                    // If a thread of the group polls, its line is reported: the other threads only
                    // wait for it at a barrier.
                    if (mine.wait.is_polling == 0) continue;
                    known->wait.is_polling = 1;
                    known->wait.place = mine.wait.place;
                }
            }
        }
    }
    // Waits for signals come first, because only its sender can make a signal come. In other calls,
    // threads that have made fewer calls come first, because the others probably wait for them. So
    // the search for the cause (kccl/sim/waits.py) begins near it.
    std::stable_sort(groups.begin(), groups.end(), [](const Group& one, const Group& other) {
        if (one.wait.is_signal != other.wait.is_signal) return one.wait.is_signal != 0;
        return one.num_calls < other.num_calls;
    });
    waits.clear();
    for (const Group& group : groups) {
        if (waits.size() < kKcclSimMostWaits) waits.push_back(group.wait);
    }
}

}  // namespace kccl::sim
