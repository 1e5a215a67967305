#include "memory.h"

#include <string.h>

#include <algorithm>

#include "words.h"

namespace kccl::sim {
namespace {

// Stores of a word that loads may still return.
constexpr size_t kKeptRecords = 8;

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

}  // namespace

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

void Granule::clear() {
    first = 0;
    records.clear();
    marks.clear();
    accesses.clear();
    waiters.clear();
    is_plainly_written = false;
}

uint32_t Granule::newer_than(uint64_t index, uint8_t halves) const {
    uint32_t count = 0;
    for (uint64_t later = std::max(index + 1, first); later <= newest(); ++later) {
        if ((records[later - first].halves & halves) != 0) ++count;
    }
    return count;
}

void Memory::restart(const Weakness& weakness, uint64_t seed, Tape* tape, bool checks) {
    weakness_ = weakness;
    random_ = Random(seed);
    tape_ = tape;
    checks_ = checks;
    ++generation_;
    ended_.clear();
    passed_over_ = {};
    sequential_ = {};
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

Memory::Page& Memory::page(const Knowledge& me, uint64_t number) {
    Page*& recent = recent_[number % kRecentPages];
    if (recent == nullptr || recent->number != number) {
        std::unique_ptr<Page>& known = pages_[number];
        if (!known) {
            known = std::make_unique<Page>();
            known->number = number;
        }
        recent = known.get();
    }
    Page& page = *recent;
    if (page.generation != generation_) {
        clear(page);
        page.launch = me.launch;
    } else if (!page.is_window && page.launch != me.launch) {
        if (ended_.contains(page.launch)) clear(page);
        page.launch = me.launch;
    }
    return page;
}

Granule& Memory::granule(const Knowledge& me, uint64_t address) {
    const uint64_t index = address / 8;
    return page(me, index / kGranulesPerPage).granules[index % kGranulesPerPage];
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
    if (!granule.records.empty() && real == granule.records.back().value) {
        granule.is_plainly_written = false;
        return;
    }
    // What a rank's program stored, it stored after what its launches did.
    append(granule, {.value = real, .released = granule.is_plainly_written ? ClockRef{} : hosts});
    if (!granule.is_plainly_written) return;
    Record& record = granule.records.back();
    record.writer = granule.plain_writer;
    record.call = granule.plain_call;
    record.site = granule.plain_site;
    granule.is_plainly_written = false;
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

// The index of the record that this thread's load of these halves returns.
uint64_t Memory::choose(Knowledge& me, Granule& granule, uint8_t halves) {
    uint64_t seen = granule.first;  // coherence: never older than what this thread knows was read
    bool knows_seen = false;
    for (uint64_t index = granule.newest();; --index) {
        Record& record = granule.record(index);
        if ((record.halves & halves) == 0) continue;
        if (index == granule.first || record.writer.agent == me.agent ||
            knows(me.ordered, record.writer)) {
            return index;
        }
        if (!knows_seen) {
            knows_seen = true;
            for (const Mark& mark : granule.marks) {
                if ((mark.halves & halves) == 0 || mark.index <= seen) continue;
                if (mark.reader.agent == me.agent || knows(me.ordered, mark.reader)) {
                    seen = mark.index;
                }
            }
        }
        if (index <= seen || !hides(record)) return index;
        ++record.skips;
        passed_over_ = record.writer;
    }
}

// This thread has seen a record.
void Memory::see(Knowledge& me, Granule& granule, uint64_t index, uint8_t halves,
                 const Access32Or64& access) {
    const Record& record = granule.record(index);
    if (record.writer.counter != 0 && record.writer.agent != me.agent) {
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
        if (!knows(me.caused, record.writer)) me.hearsay.emplace_back(record.writer, record.caused);
        if (record.released && is_mutual && record.released_to >= between) {
            join(me.performed, record.released);
            join(me.to_acquire[static_cast<uint32_t>(between)], record.released);
            if (access.order == Order::kAcquire) join(me.ordered, record.released);
        }
    }
    if (record.writer.counter == 0 && record.released) {
        join(me.performed, record.released);
        join(me.to_acquire[static_cast<uint32_t>(Scope::kSystem)], record.released);
        if (access.order == Order::kAcquire) join(me.ordered, record.released);
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
            &at, age == 0, age};
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
    const bool is_release = access.order == Order::kRelease;
    const uint64_t whole = merged(at.records.back().value, shifted, halves);
    append(at, {.value = whole,
                .writer = me.now(),
                .released = is_release ? me.snapshot() : me.released,
                .caused = me.caused,
                .call = me.call,
                .halves = halves,
                .scope = access.scope,
                .released_to = is_release ? access.scope : me.released_to,
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
                .released_to = me.released_to,
                .site = access.site});
    write_real(at.address, next, halves);
    ++me.counter;
    return {&at, true};
}

void Memory::fence(Knowledge& me, Order order, Scope scope) {
    for (uint32_t each = 0; each <= static_cast<uint32_t>(scope); ++each) {
        join(me.ordered, me.to_acquire[each]);
        join(me.performed, me.to_acquire[each]);
        me.to_acquire[each] = {};
    }
    if (order == Order::kSeqCst) {
        join(me.ordered, sequential_);
        join(me.performed, sequential_);
        join(sequential_, me.snapshot());
    }
    me.released = me.snapshot();
    me.released_to = scope;
    ++me.counter;
}

}  // namespace kccl::sim
