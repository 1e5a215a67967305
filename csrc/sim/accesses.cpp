// Loads and stores that kernels make through mem.cuh: which value a load returns, and what the
// simulator remembers of a store. See memory.h.
#include <algorithm>
#include <utility>

#include "memory.h"
#include "words.h"

namespace kccl::sim {
namespace {

// How many stores to each half of a granule (4 of its 8 bytes, see Granule) are remembered, so that
// later loads may return an old one.
constexpr size_t kKeptRecords = 8;

// Writes some halves of a granule (8 aligned bytes) to real memory; value has all 8 bytes.
// `halves`, here and below, has bit 0 for the lower 4 bytes and bit 1 for the upper ones. The
// writes are atomic, because another OS thread, which runs a rank's program, may access the word
// meanwhile.
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

// lowered() returns the value of some halves of an 8-byte word, as a load of them does. raised()
// shifts such a value to the halves' position in the word.
uint64_t lowered(uint64_t whole, uint8_t halves) {
    return halves == 3 ? whole : halves == 2 ? whole >> 32 : whole & kLow;
}
uint64_t raised(uint64_t value, uint8_t halves) { return halves == 2 ? value << 32 : value; }

bool acquires(Order order) { return order == Order::kAcquire || order == Order::kAcqRel; }
bool releases(Order order) { return order == Order::kRelease || order == Order::kAcqRel; }

}  // namespace

// ---- A granule's history ------------------------------------------------------------------------

void Memory::take_over(Granule& at, uint64_t real) {
    const uint8_t plain = at.plainly_written;
    uint8_t news = 3;
    if (!at.records.empty()) {
        const uint64_t changed = real ^ at.records.back().value;
        news = static_cast<uint8_t>(((changed & kLow) != 0 ? 1 : 0) | (changed >> 32 != 0 ? 2 : 0));
    }
    while (news != 0) {
        uint8_t halves = (news & 1) != 0 ? 1 : 2;
        const Event writer = at.plain_writers[halves - 1];
        const bool is_plain = (plain & halves) != 0;
        const bool is_alike =
            is_plain ? (plain & 2) != 0 && at.plain_writers[1] == writer : (plain & 2) == 0;
        if (news == 3 && is_alike) halves = 3;
        news &= static_cast<uint8_t>(~halves);
        Record record = {.value = real, .halves = halves};
        if (is_plain) {
            // The record has no site: the site of the plain store is in at.accesses.
            record.writer = writer;
            record.is_plain = true;
        } else if (lowered(real, halves) != 0) {
            // Otherwise the store is of a rank's program on the host. The program stores only after
            // its launches have ended, so this store hands on what their threads did.
            record.released.fill(hosts);
        }
        append(at, std::move(record));
    }
}

// Adds a record to a granule. Each half keeps its last kKeptRecords stores, however many stores the
// other half has got since.
void Memory::append(Granule& at, Record record) {
    if (at.records.size() >= kKeptRecords) make_room(at, record.halves);
    record.index = at.num_records++;
    record.written = record.halves;
    at.records.push_back(std::move(record));
}

void Memory::make_room(Granule& at, uint8_t halves) {
    for (const uint8_t half : kHalves) {
        if ((half & halves) == 0) continue;
        const auto has_half = [half](const Record& each) { return (each.halves & half) != 0; };
        const auto count = std::count_if(at.records.begin(), at.records.end(), has_half);
        if (static_cast<size_t>(count) < kKeptRecords) continue;
        const auto oldest = std::find_if(at.records.begin(), at.records.end(), has_half);
        oldest->halves &= static_cast<uint8_t>(~half);
        if (oldest->halves == 0) at.records.erase(oldest);
    }
}

size_t Granule::newest(uint8_t halves) const {
    size_t position = records.size() - 1;
    while ((records[position].halves & halves) == 0) --position;
    return position;
}

const Record* Granule::find(uint32_t index) const {
    for (size_t position = records.size(); position-- > 0;) {
        if (records[position].index == index) return &records[position];
    }
    return nullptr;
}

uint32_t Granule::newer_than(size_t position, uint8_t halves) const {
    uint32_t count = 0;
    for (size_t later = position + 1; later < records.size(); ++later) {
        if ((records[later].halves & halves) != 0) ++count;
    }
    return count;
}

// ---- What a load may see ------------------------------------------------------------------------

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

// Coherence: tells whether a load must return `record` or a newer store. That is so if `record` is
// a store of the load's own thread, if it happens before the load, or if a load that happens before
// this one has returned it.
bool Memory::must_see(const Knowledge& me, const Record& record, uint8_t halves,
                      const Access32Or64& access) {
    if (record.writer.agent == me.agent || comes_before(me, record, access)) return true;
    return std::any_of(record.sights.begin(), record.sights.end(), [&](const Sight& sight) {
        return (sight.halves & halves) != 0 &&
               (sight.reader.agent == me.agent || knows(me.ordered, sight.reader));
    });
}

// Chooses the store that a load of these halves by this thread returns. Returns its position in
// at.records.
size_t Memory::choose(Knowledge& me, Granule& at, uint8_t halves, const Access32Or64& access) {
    size_t oldest = 0;
    while ((at.records[oldest].halves & halves) == 0) ++oldest;
    for (size_t position = at.records.size() - 1;; --position) {
        Record& record = at.records[position];
        if ((record.halves & halves) == 0) continue;
        if (position == oldest || must_see(me, record, halves, access) || !hides(record))
            return position;
        ++record.skips;
        passed_over_ = record.writer;
    }
}

// Called when this thread's load has returned the record at `position`. Adds to the thread's
// knowledge (vector clocks, see Knowledge) what the record has released and what its writer knew.
void Memory::see(Knowledge& me, Granule& at, size_t position, uint8_t halves,
                 const Access32Or64& access) {
    Record& record = at.records[position];
    const auto take = [&](const ClockRef& released, Scope between) {
        if (!released) return;
        join(me.to_acquire[static_cast<uint32_t>(between)], released);
        if (acquires(access.order)) join(me.ordered, released);
    };
    if (record.writer.counter == 0 && !access.is_packet) {
        take(record.released[2], Scope::kSystem);
        join(me.caused, record.released[2]);
    } else if (record.is_update && record.writer.agent == me.agent) {
        // A read-modify-write also hands on what those before it, of other threads, had released.
        // This thread learns that when it loads the result of its own.
        take(record.released[static_cast<uint32_t>(access.scope)], access.scope);
    } else if (record.writer.counter != 0 && record.writer.agent != me.agent) {
        const Scope between = slots_.between(me.agent.slot, record.writer.agent.slot);
        const bool is_mutual = record.scope >= between && access.scope >= between;
        if (!is_mutual && checks_ && !knows(me.ordered, record.writer)) {
            reporter_.report(kKcclSimNarrowScope, doing(me, kKcclSimLoad, access.site), at.address,
                             deed_of(record));
        }
        if (passed_over_.counter != 0 && record.writer.agent == passed_over_.agent &&
            record.writer.counter > passed_over_.counter) {
            ++passed_stores;
            passed_over_ = {};
        }
        me.hear(record.writer, record.caused);
        if (is_mutual) take(record.released[static_cast<uint32_t>(between)], between);
        if (access.is_system_packet()) join(me.packets_to_acquire, record.packets_released);
        const bool is_first =
            std::none_of(record.sights.begin(), record.sights.end(), [&](const Sight& sight) {
                return sight.reader.agent == me.agent && sight.halves == halves;
            });
        if (is_first) record.sights.push_back({me.now(), halves});
    }
    // A load of the initial value gets no Mark: thousands of threads may make such loads, and the
    // search below would take long. Instead `looks` gets one entry for all such loads of a block.
    if (record.writer.counter == 0 && !access.is_packet) {
        if (checks_) {
            if (!at.looks) at.looks = std::make_unique<std::vector<Access>>();
            add(*at.looks, me, Access::kLoad, bytes_of(halves), false, access.site);
        }
        return;
    }
    const Mark mark = {.reader = me.now(),
                       .index = record.index,
                       .call = me.call,
                       .halves = halves,
                       .state = Mark::kPolled,
                       .is_packet = access.is_packet,
                       .site = access.site,
                       .step = step_};
    for (Mark& known : at.marks) {
        if (known.reader.agent == me.agent && known.halves == halves) {
            known = mark;
            return;
        }
    }
    at.marks.push_back(mark);
}

Memory::Seen Memory::load(Knowledge& me, const Access32Or64& access) {
    ++loads;
    Granule& at = granule(me, access.address);
    refresh(at);
    const uint8_t halves = halves_of(access.address, access.num_bytes);
    check_plain(me, at, access, kKcclSimLoad);
    size_t low = 0;
    size_t high = 0;
    const bool is_split = halves == 3 && std::any_of(at.records.begin(), at.records.end(),
                                                     [](const Record& r) { return r.halves != 3; });
    if (!is_split) {
        low = high = choose(me, at, halves, access);
    } else {
        low = choose(me, at, 1, access);
        high = choose(me, at, 2, access);
        // The load is one access. So if the store that it returns for one half is a store of both
        // halves or came after one, the store for the other half must not be older than that one.
        for (size_t position = std::max(low, high) + 1; position-- > 0;) {
            if (at.records[position].written != 3) continue;
            low = std::max(low, position);
            high = std::max(high, position);
            break;
        }
    }
    const uint64_t value = merged(at.records[low].value, at.records[high].value, 2);
    see(me, at, low, is_split ? 1 : halves, access);
    if (is_split) see(me, at, high, 2, access);
    const uint32_t age =
        is_split ? at.newer_than(low, 1) + at.newer_than(high, 2) : at.newer_than(low, halves);
    if (age != 0) ++old_loads;
    return {lowered(value, halves), &at, age == 0, age, at.records[low].writer};
}

// ---- Stores -------------------------------------------------------------------------------------

void Memory::put(Knowledge& me, Granule& at, const Access32Or64& access, uint64_t value,
                 ByScope released, bool is_release) {
    const uint8_t halves = halves_of(access.address, access.num_bytes);
    const uint64_t whole = merged(at.records.back().value, raised(value, halves), halves);
    append(at, {.value = whole,
                .writer = me.now(),
                .released = std::move(released),
                .packets_released = access.is_system_packet() ? me.packets_released : ClockRef(),
                .caused = me.caused,
                .call = me.call,
                .halves = halves,
                .scope = access.scope,
                .is_release = is_release,
                .is_packet = access.is_packet,
                .site = access.site,
                .step = step_});
    write_real(at.address, whole, halves);
    ++me.counter;
}

Granule* Memory::store(Knowledge& me, const Access32Or64& access, uint64_t value) {
    Granule& at = granule(me, access.address);
    refresh(at);
    const uint8_t halves = halves_of(access.address, access.num_bytes);
    check_plain(me, at, access, kKcclSimStore);
    check_store(me, at, access, raised(value, halves));
    me.settle_hearsay();
    bool is_release = releases(access.order);
    ByScope released = me.released;
    if (is_release) {
        hand_on(released, access.scope, me.snapshot());
    } else {
        // After a release of this word, the thread's later stores to the word hand on the same,
        // even if they are relaxed (C++'s release sequence).
        for (const Record& before : at.records) {
            if (!before.is_release || before.writer.agent != me.agent || before.written != halves)
                continue;
            is_release = true;
            for (size_t scope = 0; scope < released.size(); ++scope)
                join(released[scope], before.released[scope]);
        }
    }
    put(me, at, access, value, std::move(released), is_release);
    return &at;
}

Memory::Updated Memory::update(Knowledge& me, const Access32Or64& access, Update what,
                               uint32_t value) {
    Granule& at = granule(me, access.address);
    refresh(at);
    const uint8_t halves = halves_of(access.address, 4);
    check_plain(me, at, access, kKcclSimStore);
    see(me, at, at.newest(halves), halves, access);
    const auto before = static_cast<uint32_t>(lowered(at.records.back().value, halves));
    if (what == Update::kClaim && before != 0) return {&at, before, before, false};
    me.settle_hearsay();
    ByScope released = me.released;
    if (releases(access.order)) hand_on(released, access.scope, me.snapshot());
    // A read-modify-write also hands on what the store before it released, if the scopes of both
    // include both threads.
    const Record& updated = at.records[at.newest(halves)];
    const Scope between = slots_.between(me.agent.slot, updated.writer.agent.slot);
    if (updated.writer.counter != 0 && updated.scope >= between && access.scope >= between) {
        for (size_t scope = 0; scope < released.size(); ++scope)
            join(released[scope], updated.released[scope]);
    }
    const uint32_t after = what == Update::kClaim ? value : before + value;
    put(me, at, access, after, std::move(released), releases(access.order));
    at.records.back().is_update = true;
    return {&at, before, after, true};
}

}  // namespace kccl::sim
