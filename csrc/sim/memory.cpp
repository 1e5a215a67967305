#include "memory.h"

#include <string.h>

#include <algorithm>
#include <utility>

#include "words.h"

namespace kccl::sim {
namespace {

// Stores of a word that loads may still return.
constexpr size_t kKeptRecords = 8;
constexpr size_t kMostHearsay = 64;

// Another thread of this process, which holds the rank's host code, may write there meanwhile.
uint64_t read_real(uint64_t address) {
    return __atomic_load_n(reinterpret_cast<const uint64_t*>(address), __ATOMIC_RELAXED);
}

void write_real(uint64_t address, uint64_t value, uint8_t halves) {
    auto* words = reinterpret_cast<uint32_t*>(address);
    if (halves == 3) {
        __atomic_store_n(reinterpret_cast<uint64_t*>(address), value, __ATOMIC_RELAXED);
    } else if (halves == 1) {
        __atomic_store_n(words, static_cast<uint32_t>(value), __ATOMIC_RELAXED);
    } else {
        __atomic_store_n(words + 1, static_cast<uint32_t>(value >> 32), __ATOMIC_RELAXED);
    }
}

constexpr Scope kScopes[] = {Scope::kBlock, Scope::kDevice, Scope::kSystem};

// Hands this on to all whom the scope takes in.
void release(ByScope& released, Scope scope, const ClockRef& known) {
    for (uint32_t each = 0; each <= static_cast<uint32_t>(scope); ++each) released[each] = known;
}

}  // namespace

void Knowledge::hear(Event event, const ClockRef& told) {
    if (knows(caused, event)) return;
    hearsay.emplace_back(event, told);
    // A thread that only polls never asks.
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

ClockRef Knowledge::snapshot() const {
    ClockRef clock = ordered;
    edit(clock).add(now());
    return clock;
}

void Memory::restart(const Weakness& weakness, uint64_t seed, Tape* tape, bool checks) {
    weakness_ = weakness;
    random_ = Random(seed);
    tape_ = tape;
    checks_ = checks;
    ++generation_;
    ended_.clear();
    passed_over_ = {};
    sequential_.clear();
    old_loads = loads = passed_stores = 0;
}

// ---- Where things are ---------------------------------------------------------------------------

void Memory::clear(Page& page) {
    page.generation = generation_;
    for (uint64_t i = 0; i < kGranulesPerPage; ++i) {
        page.granules[i].clear();
        page.granules[i].address = (page.number * kGranulesPerPage + i) * 8;
    }
    const uint64_t address = page.number * kGranulesPerPage * 8;
    page.is_window = std::any_of(windows_.begin(), windows_.end(), [address](const Window& each) {
        return address + kGranulesPerPage * 8 > each.address &&
               address < each.address + each.num_bytes;
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

// Why each by itself: what shares a page differs from one process to the next.
Granule& Memory::granule(const Knowledge& me, uint64_t address) {
    const uint64_t index = address / 8;
    Page& its_page = page(index / kGranulesPerPage);
    Granule& granule = its_page.granules[index % kGranulesPerPage];
    if (granule.launch != me.launch && !its_page.is_window) {
        if (ended_.contains(granule.launch)) granule.clear();
        granule.launch = me.launch;
    }
    return granule;
}

void Memory::forget(uint64_t address, uint64_t num_bytes) {
    const uint64_t page_bytes = kGranulesPerPage * 8;
    for (uint64_t number = address / page_bytes; number * page_bytes < address + num_bytes;
         ++number) {
        const auto known = pages_.find(number);
        if (known == pages_.end()) continue;
        for (Granule& each : known->second->granules) {
            if (each.address + 8 > address && each.address < address + num_bytes) each.clear();
        }
    }
}

void Memory::add_window(int rank, uint64_t address, uint64_t num_bytes) {
    forget(address, num_bytes);
    windows_.push_back({address, num_bytes, rank});
    ++generation_;
}

void Memory::remove_window(uint64_t address) {
    std::erase_if(windows_, [address](const Window& each) { return each.address == address; });
}

// ---- What a load may see ------------------------------------------------------------------------

// Takes over what was written to real memory behind the records: by plain stores, or by the host.
void Memory::refresh(Granule& granule) {
    const uint64_t real = read_real(granule.address);
    const bool is_plainly_written = std::exchange(granule.is_plainly_written, false);
    if (!granule.records.empty() && real == granule.records.back().value) return;
    Record record = {.value = real};
    if (is_plainly_written) {
        record.writer = granule.plain_writer;
        record.call = granule.plain_call;
        record.site = granule.plain_site;
    } else if (real != 0) {
        // What a rank's program stored, it stored after what its launches did.
        record.released.fill(hosts);
    }
    append(granule, std::move(record));
}

void Memory::append(Granule& granule, Record record) {
    if (granule.records.size() == kKeptRecords) {
        granule.records.erase(granule.records.begin());
        ++granule.first;
        // Where the other half was stored earlier still, this is now its oldest value.
        granule.records.front().halves = 3;
    }
    granule.records.push_back(std::move(record));
}

bool Memory::hides(const Record& record) {
    if (record.skips >= weakness_.max_skips) return false;
    if (tape_ != nullptr) return tape_->next(2) != 0;
    switch (weakness_.target) {
        case Weakness::kAll: break;
        case Weakness::kPackets:
            if (!record.is_packet) return false;
            break;
        case Weakness::kOthers:
            if (record.is_packet) return false;
            break;
        case Weakness::kOneRank:
            if (slots_[record.writer.agent.slot].rank != weakness_.rank) return false;
            break;
    }
    return random_.below(256) < weakness_.old_per_256;
}

// Coherence: a load returns nothing older than what this thread stored, what happens before, and what
// was read there by loads that happen before.
bool Memory::must_see(const Knowledge& me, const Record& record, uint8_t halves) {
    if (record.writer.agent == me.agent || knows(me.ordered, record.writer)) return true;
    return std::any_of(record.sights.begin(), record.sights.end(), [&](const Sight& sight) {
        return (sight.halves & halves) != 0 &&
               (sight.reader.agent == me.agent || knows(me.ordered, sight.reader));
    });
}

// The index of the record that this thread's load of these halves returns.
uint64_t Memory::choose(Knowledge& me, Granule& granule, uint8_t halves) {
    for (uint64_t index = granule.newest();; --index) {
        Record& record = granule.record(index);
        if ((record.halves & halves) == 0) continue;
        if (index == granule.first || must_see(me, record, halves) || !hides(record)) return index;
        ++record.skips;
        passed_over_ = record.writer;
    }
}

// This thread has seen a record.
void Memory::see(Knowledge& me, Granule& granule, uint64_t index, uint8_t halves,
                 const Access32Or64& access) {
    Record& record = granule.record(index);
    const auto take = [&](const ClockRef& released, Scope between) {
        if (!released) return;
        join(me.to_acquire[static_cast<uint32_t>(between)], released);
        if (access.order == Order::kAcquire) join(me.ordered, released);
    };
    if (record.writer.counter == 0 && !access.is_packet) {
        take(record.released[2], Scope::kSystem);
        join(me.caused, record.released[2]);
    } else if (record.writer.counter != 0 && record.writer.agent != me.agent) {
        const Scope between = slots_.between(me.agent.slot, record.writer.agent.slot);
        const bool is_mutual = record.scope >= between && access.scope >= between;
        if (!is_mutual && checks_ && !knows(me.ordered, record.writer)) {
            reporter_.report(kKcclSimNarrowScope, me.agent, me.call, access.site, granule.address,
                             other_of(record));
        }
        if (passed_over_.counter != 0 && record.writer.agent == passed_over_.agent &&
            record.writer.counter > passed_over_.counter) {
            ++passed_stores;
            passed_over_ = {};
        }
        me.hear(record.writer, record.caused);
        if (is_mutual) take(record.released[static_cast<uint32_t>(between)], between);
        const bool is_first =
            std::none_of(record.sights.begin(), record.sights.end(), [&](const Sight& sight) {
                return sight.reader.agent == me.agent && sight.halves == halves;
            });
        if (is_first) record.sights.push_back({me.now(), halves});
    }
    // What was there from the start is not worth remembering by each of thousands of threads.
    if (record.writer.counter == 0 && index == 0 && !access.is_packet) return;
    const Mark mark = {.reader = me.now(),
                       .index = index,
                       .call = me.call,
                       .halves = halves,
                       .state = Mark::kPolled,
                       .is_packet = access.is_packet,
                       .site = access.site};
    for (Mark& known : granule.marks) {
        if (known.reader.agent == me.agent && known.halves == halves) {
            known = mark;
            return;
        }
    }
    granule.marks.push_back(mark);
}

Memory::Seen Memory::load(Knowledge& me, const Access32Or64& access) {
    ++loads;
    Granule& at = granule(me, access.address);
    refresh(at);
    const uint8_t halves = halves_of(access.address, access.num_bytes);
    check_plain(me, at, access, false);
    uint64_t low = at.newest();
    uint64_t high = low;
    const bool is_split = halves == 3 && std::any_of(at.records.begin(), at.records.end(),
                                                     [](const Record& r) { return r.halves != 3; });
    if (!is_split) {
        low = high = choose(me, at, halves);
    } else {
        low = choose(me, at, 1);
        high = choose(me, at, 2);
        // One access: no half is older than a store of both that the other half comes after.
        for (uint64_t index = std::max(low, high);; --index) {
            if (at.record(index).halves == 3) {
                low = std::max(low, index);
                high = std::max(high, index);
                break;
            }
            if (index == at.first) break;
        }
    }
    const uint64_t value = merged(at.record(low).value, at.record(high).value, 2);
    see(me, at, low, is_split ? 1 : halves, access);
    if (is_split) see(me, at, high, 2, access);
    const uint32_t age =
        is_split ? at.newer_than(low, 1) + at.newer_than(high, 2) : at.newer_than(low, halves);
    if (age != 0) ++old_loads;
    const bool is_upper = halves == 2;
    return {access.num_bytes == 8 ? value
            : is_upper            ? value >> 32
                                  : value & kLow,
            &at, age == 0, age, at.record(low).writer};
}

// ---- Stores -------------------------------------------------------------------------------------

Granule* Memory::store(Knowledge& me, const Access32Or64& access, uint64_t value) {
    Granule& at = granule(me, access.address);
    refresh(at);
    const uint8_t halves = halves_of(access.address, access.num_bytes);
    const uint64_t shifted = halves == 2 ? value << 32 : value;
    check_plain(me, at, access, true);
    check_store(me, at, access, halves, shifted);
    me.settle_hearsay();
    bool is_release = access.order == Order::kRelease;
    ByScope released = me.released;
    if (is_release) {
        release(released, access.scope, me.snapshot());
    } else {
        // A release of this word covers the thread's later stores to it.
        for (const Record& before : at.records) {
            if (!before.is_release || before.writer.agent != me.agent || before.halves != halves)
                continue;
            is_release = true;
            for (size_t scope = 0; scope < released.size(); ++scope)
                join(released[scope], before.released[scope]);
        }
    }
    const uint64_t whole = merged(at.records.back().value, shifted, halves);
    append(at, {.value = whole,
                .writer = me.now(),
                .released = std::move(released),
                .caused = me.caused,
                .call = me.call,
                .halves = halves,
                .scope = access.scope,
                .is_release = is_release,
                .is_packet = access.is_packet,
                .site = access.site});
    write_real(at.address, whole, halves);
    ++me.counter;
    return &at;
}

std::pair<Granule*, bool> Memory::claim(Knowledge& me, const Access32Or64& access, uint32_t value) {
    Granule& at = granule(me, access.address);
    refresh(at);
    check_plain(me, at, access, true);
    const uint8_t halves = halves_of(access.address, 4);
    uint64_t newest = at.newest();
    while ((at.record(newest).halves & halves) == 0) --newest;
    see(me, at, newest, halves, access);
    const uint64_t whole = at.records.back().value;
    if ((halves == 2 ? whole >> 32 : whole & kLow) != 0) return {&at, false};
    me.settle_hearsay();
    const uint64_t shifted = halves == 2 ? uint64_t{value} << 32 : value;
    const uint64_t next = merged(whole, shifted, halves);
    append(at, {.value = next,
                .writer = me.now(),
                .released = me.released,
                .caused = me.caused,
                .call = me.call,
                .halves = halves,
                .scope = access.scope,
                .site = access.site});
    write_real(at.address, next, halves);
    ++me.counter;
    return {&at, true};
}

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
        if (each > scope) break;
        ClockRef& seen = me.to_acquire[static_cast<uint32_t>(each)];
        join(me.ordered, seen);
        seen = {};
        if (order != Order::kSeqCst) continue;
        // After all such fences before it whose scopes and its own take in both threads.
        for (ClockRef* clock : {&me.ordered, &me.caused}) {
            join(*clock, sequential(me.agent, each));
        }
    }
    const ClockRef known = me.snapshot();
    release(me.released, scope, known);
    ++me.counter;
    if (order != Order::kSeqCst) return;
    for (const Scope each : kScopes) {
        if (each <= scope) join(sequential(me.agent, each), known);
    }
}

}  // namespace kccl::sim
