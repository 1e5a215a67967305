// Implements the clocks of threads (Knowledge), the table of all words, and fences: see memory.h.
// Loads and stores are in accesses.cpp.
#include "memory.h"

#include <algorithm>

namespace kccl::sim {
namespace {

constexpr size_t kMostHearsay = 64;

constexpr Scope kScopes[] = {Scope::kBlock, Scope::kDevice, Scope::kSystem};

}  // namespace

void Knowledge::hear(Event event, const ClockRef& told) {
    if (knows(caused, event)) return;
    hearsay.emplace_back(event, told);
    // A thread that only polls does nothing else that empties `hearsay`, which would grow without
    // end.
    if (hearsay.size() == kMostHearsay) settle_hearsay();
}

void Knowledge::settle_hearsay() {
    if (hearsay.empty()) return;
    Clock& clock = edit(caused);
    const Clock* last = nullptr;
    for (const auto& [event, told] : hearsay) {
        clock.add(event);
        if (told && told.get() != last) clock.join(*told);
        last = told.get();
    }
    hearsay.clear();
}

void hand_on(ByScope& released, Scope scope, const ClockRef& known) {
    for (uint32_t each = 0; each <= static_cast<uint32_t>(scope); ++each) released[each] = known;
}

ClockRef Knowledge::snapshot() const {
    ClockRef clock = ordered;
    edit(clock).add(now());
    return clock;
}

ClockRef Knowledge::packets_snapshot() const {
    ClockRef clock = snapshot();
    join(clock, packets);
    return clock;
}

void Memory::restart(const Weakness& weakness, uint64_t seed, Tape* tape, bool checks) {
    weakness_ = weakness;
    random_ = Random(seed);
    tape_ = tape;
    checks_ = checks;
    ++generation_;
    launches_.clear();
    passed_over_ = {};
    sequential_.clear();
    old_loads = loads = passed_stores = 0;
}

// ---- Where things are ---------------------------------------------------------------------------

void Memory::clear(Page& page) {
    page.generation = generation_;
    page.is_window = is_window(page.number);
    for (uint64_t i = 0; i < kGranulesPerPage; ++i) {
        page.granules[i].clear();
        page.granules[i].address = (page.number * kGranulesPerPage + i) * 8;
    }
}

bool Memory::is_window(uint64_t page) const {
    const uint64_t address = page * kPageBytes;
    return std::any_of(windows_.begin(), windows_.end(), [address](const Window& each) {
        return address + kPageBytes > each.address && address < each.address + each.num_bytes;
    });
}

Memory::Page& Memory::page(uint64_t number) {
    Page*& recent = recent_[number % kRecentPages];
    if (recent == nullptr || recent->number != number) {
        std::unique_ptr<Page>& known = pages_[number];
        if (!known) {
            known = std::make_unique<Page>();
            known->number = number;
        }
        recent = known.get();
    }
    if (recent->generation != generation_) clear(*recent);
    return *recent;
}

// Returns the granule of an address. Outside of windows, clears it if the launch that used it last
// has ended. A page is not cleared as a whole, because which granules share a page differs between
// processes, and findings must not depend on that.
Granule& Memory::granule(const Knowledge& me, uint64_t address) {
    const uint64_t index = address / 8;
    Page& its_page = page(index / kGranulesPerPage);
    Granule& granule = its_page.granules[index % kGranulesPerPage];
    if (granule.launch != me.launch && !its_page.is_window) {
        if (!is_running(granule.launch)) granule.clear();
        granule.launch = me.launch;
    }
    return granule;
}

void Memory::forget(uint64_t address, uint64_t num_bytes) {
    for (uint64_t number = address / kPageBytes; number * kPageBytes < address + num_bytes;
         ++number) {
        const auto known = pages_.find(number);
        if (known == pages_.end()) continue;
        known->second->is_window = is_window(number);
        for (Granule& each : known->second->granules) {
            if (each.address + 8 > address && each.address < address + num_bytes) each.clear();
        }
    }
}

// Adds a rank's part of a window. Forgets earlier accesses to this memory only, because ranks that
// use other windows may be in the middle of a launch.
void Memory::add_window(int rank, uint64_t address, uint64_t num_bytes) {
    windows_.push_back({address, num_bytes, rank});
    forget(address, num_bytes);
}

void Memory::remove_window(uint64_t address) {
    const auto gone = std::find_if(windows_.begin(), windows_.end(), [address](const Window& each) {
        return each.address == address;
    });
    if (gone == windows_.end()) return;
    const uint64_t num_bytes = gone->num_bytes;
    windows_.erase(gone);
    forget(address, num_bytes);
}

// ---- Fences -------------------------------------------------------------------------------------

ClockRef& Memory::sequential(Agent agent, Scope scope) {
    switch (scope) {
        case Scope::kBlock: return sequential_[{scope, agent.slot}];
        case Scope::kDevice:
            return sequential_[{scope, static_cast<uint32_t>(slots_[agent.slot].rank)}];
        default: return sequential_[{scope, 0}];
    }
}

void Memory::fence(Knowledge& me, Order order, Scope scope) {
    for (const Scope each : kScopes) {
        if (each > scope || order == Order::kRelease) break;
        ClockRef& seen = me.to_acquire[static_cast<uint32_t>(each)];
        join(me.ordered, seen);
        seen = {};
        if (order != Order::kSeqCst) continue;
        // A kSeqCst fence comes after all earlier kSeqCst fences, if the scopes of both fences
        // include both threads.
        for (ClockRef* clock : {&me.ordered, &me.caused}) {
            join(*clock, sequential(me.agent, each));
        }
    }
    if (order == Order::kAcquire) {
        if (scope == Scope::kSystem) acquire_packets(me);
        return;
    }
    const ClockRef known = me.snapshot();
    hand_on(me.released, scope, known);
    if (scope == Scope::kSystem) {
        if (order != Order::kRelease) acquire_packets(me);
        release_packets(me);
    } else {
        ++me.counter;
    }
    if (order != Order::kSeqCst) return;
    for (const Scope each : kScopes) {
        if (each <= scope) join(sequential(me.agent, each), known);
    }
}

void Memory::fence_packets(Knowledge& me) {
    acquire_packets(me);
    release_packets(me);
}

void Memory::acquire_packets(Knowledge& me) {
    join(me.packets, me.packets_to_acquire);
    me.packets_to_acquire = {};
}

void Memory::release_packets(Knowledge& me) {
    me.packets_released = me.packets_snapshot();
    ++me.counter;
}

}  // namespace kccl::sim
