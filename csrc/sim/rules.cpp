// Checks the rules that accesses must keep (MODEL.md): plain accesses are ordered with others to
// the same bytes, the stores to a word are ordered, and a packet is not overwritten before its
// reader has said that it has read it.
#include <algorithm>
#include <utility>

#include "memory.h"
#include "words.h"

namespace kccl::sim {

// ---- Words accessed through mem.cuh -------------------------------------------------------------

// Reports this store if an earlier store to these halves, `before`, is of another thread and
// nothing orders it before this store.
void Memory::check_writers(const Knowledge& me, Granule& at, const Access32Or64& access,
                           const Record& before, uint8_t halves) {
    if (before.writer.agent == me.agent || comes_before(me, before, access)) return;
    // The order is also clear if this thread has loaded the earlier store or a later one, or knows
    // (`caused`) of a thread that has. Of each thread's loads, `sights` has the first and `marks`
    // the last. Both are needed, because the last may be so late that nobody knows of it yet.
    const auto is_known = [&](Event reader, uint8_t seen) {
        return (seen & halves) != 0 && (reader.agent == me.agent || knows(me.caused, reader));
    };
    for (const Mark& mark : at.marks) {
        if (mark.index >= before.index && is_known(mark.reader, mark.halves)) return;
    }
    for (const Record& record : at.records) {
        if (record.index < before.index) continue;
        for (const Sight& sight : record.sights) {
            if (is_known(sight.reader, sight.halves)) return;
        }
    }
    reporter_.report(kKcclSimTwoWriters, doing(me, kKcclSimStore, access.site), access.address,
                     deed_of(before));
}

// Checks a store by two rules: the earlier stores that set the value that it overwrites are ordered
// before it (two writers), and, if it is a packet, the readers of earlier packets here have said so
// (slot reused).
void Memory::check_store(Knowledge& me, Granule& at, const Access32Or64& access, uint64_t value) {
    if (!checks_) return;
    me.settle_hearsay();
    const std::vector<Record>& records = at.records;
    const uint64_t changed = records.back().value ^ value;
    const uint8_t halves = halves_of(access.address, access.num_bytes);
    const Record* last = nullptr;
    for (const uint8_t half : kHalves) {
        if ((half & halves) == 0 || merged(0, changed, half) == 0) continue;
        const size_t newest = at.newest(half);
        for (size_t i = newest + 1; i-- > 0;) {
            const Record& before = records[i];
            if ((before.written & half) == 0) continue;
            // An earlier store of both halves is checked once, not once for each half.
            const uint8_t seen = (i == newest ? before.halves : before.written) & halves;
            if (&before != last) check_writers(me, at, access, before, seen);
            if (i == newest) last = &before;
            // If that store has not changed the half, the search goes on with the store before it,
            // whose value is overwritten too.
            if (i == 0 || merged(0, records[i - 1].value ^ before.value, half) != 0) break;
        }
    }
    if (!access.is_packet) return;
    for (const Mark& mark : at.marks) {
        if (mark.state != Mark::kTaken || !mark.is_packet || mark.reader.agent == me.agent)
            continue;
        if (knows(me.caused, mark.reader)) continue;
        reporter_.report(kKcclSimReusedSlot, doing(me, kKcclSimStore, access.site), access.address,
                         deed_of(mark));
    }
}

void Memory::settle(Knowledge& me, const std::vector<Look>& polled, size_t first, bool is_taken) {
    for (size_t i = first; i < polled.size(); ++i) {
        Granule* const at = polled[i].granule;
        for (Mark& mark : at->marks) {
            if (mark.reader.agent != me.agent || mark.state != Mark::kPolled) continue;
            mark.state = is_taken ? Mark::kTaken : Mark::kRejected;
            if (!is_taken || !mark.is_packet || !checks_) continue;
            check_taken(*at, mark);
        }
    }
}

// Checks a packet whose value a thread has used: it must be of the thread's own call (stale word),
// and no other thread may have overwritten it without knowing of this load (slot reused).
void Memory::check_taken(Granule& at, const Mark& mark) {
    const Record* const record = at.find(mark.index);
    if (record == nullptr) return;
    const CallInfo& mine = calls_[mark.call];
    const auto is_of_my_call = [&](const Record& other) {
        const CallInfo& theirs = calls_[other.call];
        return mine.channel >= 0 && theirs.channel == mine.channel && theirs.number == mine.number;
    };
    for (const Record& later : at.records) {
        if (later.index <= mark.index) continue;
        if ((later.halves & mark.halves) == 0 || !later.is_packet) continue;
        if (later.writer.agent == mark.reader.agent) continue;
        // The writer of the later packet knows of this load, perhaps through another thread of the
        // warp, so it may overwrite the packet.
        if (knows(later.caused, mark.reader)) break;
        if (is_of_my_call(later)) {
            // The later packet is the one for this call, so the thread has taken an older one for
            // it.
            reporter_.report(kKcclSimStaleWord, deed_of(mark), at.address, deed_of(*record));
        } else {
            reporter_.report(kKcclSimReusedSlot, deed_of(later), at.address, deed_of(mark));
        }
        return;
    }
    const bool is_written = record->writer.counter != 0 && record->is_packet;
    if (is_written && mine.channel >= 0 && calls_[record->call].channel == mine.channel &&
        !is_of_my_call(*record)) {
        reporter_.report(kKcclSimStaleWord, deed_of(mark), at.address, deed_of(*record));
    }
}

// ---- Plain accesses -----------------------------------------------------------------------------

void Access::add(Event next) {
    if (next.agent != event.agent && counters.empty()) {
        counters.resize(event.agent.thread + 1);
        counters[event.agent.thread] = event.counter;
        last = event.counter;
    }
    event = next;
    if (counters.empty()) return;
    if (next.agent.thread >= counters.size()) counters.resize(next.agent.thread + 1);
    counters[next.agent.thread] = next.counter;
    last = std::max(last, next.counter);
}

void Memory::add(std::vector<Access>& accesses, const Knowledge& me, Access::Kind kind,
                 uint8_t bytes, bool is_async, uint64_t site) {
    const uint32_t slot = me.agent.slot;
    auto at = accesses.begin();
    if (accesses.size() > 1) {
        at = std::lower_bound(at, accesses.end(), slot, [](const Access& each, uint32_t other) {
            return each.event.agent.slot < other;
        });
    } else if (!accesses.empty() && at->event.agent.slot < slot) {
        ++at;
    }
    for (; at != accesses.end() && at->event.agent.slot == slot; ++at) {
        if (at->kind != kind || at->is_async != is_async || at->bytes != bytes) continue;
        if (at->is_last_of(me.now())) return;
        at->add(me.now());
        at->call = me.call;
        at->site = site;
        at->step = step_;
        return;
    }
    accesses.insert(at, {.event = me.now(),
                         .call = me.call,
                         .bytes = bytes,
                         .is_async = is_async,
                         .kind = kind,
                         .site = site,
                         .step = step_});
}

bool Memory::is_unordered(const Access& access, const ClockRef& clock, Agent me, Event* which) {
    const uint32_t slot = access.event.agent.slot;
    if (access.counters.empty()) {
        *which = access.event;
        return access.event.agent != me && !knows(clock, access.event);
    }
    if (clock && clock->knows_all(slot, access.last)) return false;
    for (uint32_t thread = 0; thread < access.counters.size(); ++thread) {
        *which = {{slot, thread}, access.counters[thread]};
        if (which->agent != me && !knows(clock, *which)) return true;
    }
    return false;
}

void Memory::check_plain(const Knowledge& me, Granule& at, const Access32Or64& access,
                         KcclSimEventKind kind) {
    if (!checks_ || at.accesses.empty()) return;
    const uint8_t bytes = bytes_of(halves_of(access.address, access.num_bytes));
    for (const Access& before : at.accesses) {
        if ((before.bytes & bytes) == 0 ||
            !(kind == kKcclSimStore || before.kind == Access::kWrite))
            continue;
        Event which;
        if (!is_unordered(before, me.ordered, me.agent, &which)) continue;
        reporter_.report(kKcclSimDataRace, doing(me, kind, access.site), access.address,
                         deed_of(before, which));
    }
}

bool Memory::knows_writes(const Knowledge& me, uint64_t address, uint64_t num_bytes,
                          const std::vector<uint32_t>& begun, uint64_t site) {
    // A call refuses a message of more bytes than this, so its memory is not checked.
    constexpr uint64_t kMostBytes = uint64_t{1} << 26;
    if (num_bytes > kMostBytes) return true;
    const uint32_t slot = me.agent.slot;
    const auto is_missed = [&](Event event) {
        return event.counter != 0 && event.agent != me.agent && event.agent.thread < begun.size() &&
               event.counter <= begun[event.agent.thread] && !knows(me.ordered, event);
    };
    const auto find = [&](const Access& access, Event* which) {
        if (access.kind != Access::kWrite || access.is_async || access.event.agent.slot != slot) {
            return false;
        }
        if (access.counters.empty()) return is_missed(*which = access.event);
        for (uint32_t thread = 0; thread < access.counters.size(); ++thread) {
            if (is_missed(*which = {{slot, thread}, access.counters[thread]})) return true;
        }
        return false;
    };
    for (uint64_t at = address / 8 * 8; at < address + num_bytes; at += 8) {
        const auto page = pages_.find(at / kPageBytes);
        if (page == pages_.end() || page->second->generation != generation_) continue;
        const Granule& granule = page->second->granules[at / 8 % kGranulesPerPage];
        if (granule.launch != me.launch && !page->second->is_window) continue;
        const uint8_t first = at < address ? 0xff << (address - at) & 0xff : 0xff;
        const uint64_t behind = at + 8 > address + num_bytes ? at + 8 - address - num_bytes : 0;
        const auto bytes = static_cast<uint8_t>(first & 0xff >> behind);
        for (const Access& access : granule.accesses) {
            Event which;
            if ((access.bytes & bytes) == 0 || !find(access, &which)) continue;
            reporter_.report(kKcclSimDataRace, doing(me, kKcclSimRead, site), at,
                             deed_of(access, which));
            return false;
        }
    }
    return true;
}

void Memory::plain_range(Knowledge& me, uint64_t address, uint64_t num_bytes, bool is_write,
                         bool is_async, const ClockRef* fenced, uint64_t site) {
    const uint64_t end = address + num_bytes;
    for (uint64_t first = address / 8 * 8; first < end; first += 8) {
        const uint64_t from = std::max(first, address) - first;
        const uint64_t to = std::min(first + 8, end) - first;
        const auto bytes = static_cast<uint8_t>(((1u << to) - 1) & ~((1u << from) - 1));
        plain_one(me, granule(me, first), bytes, is_write, is_async, fenced, site);
    }
}

void Memory::plain_one(Knowledge& me, Granule& at, uint8_t bytes, bool is_write, bool is_async,
                       const ClockRef* fenced, uint64_t site) {
    const KcclSimEventKind kind = is_write ? kKcclSimWrite : kKcclSimRead;
    if (is_write) {
        if (!at.records.empty()) refresh(at);
        for (const uint8_t half : kHalves) {
            if ((bytes_of(half) & bytes) == 0) continue;
            at.plainly_written |= half;
            at.plain_writers[half - 1] = me.now();
        }
    }
    if (!checks_) return;
    const auto report = [&](const Deed& other) {
        reporter_.report(kKcclSimDataRace, doing(me, kind, site), at.address, other);
    };
    for (const Access& before : at.accesses) {
        if ((before.bytes & bytes) == 0 || !(is_write || before.kind == Access::kWrite)) continue;
        // An asynchronous copy reads and writes through another proxy (PTX), so an ordinary write
        // comes before it only by way of a fence_copies().
        const bool needs_fence = is_async && !before.is_async && before.kind == Access::kWrite;
        Event which;
        if (is_unordered(before, needs_fence ? *fenced : me.ordered, me.agent, &which)) {
            report(deed_of(before, which));
        }
    }
    for (const Record& record : at.records) {
        if ((bytes_of(record.halves) & bytes) == 0 || record.writer.agent == me.agent) continue;
        if (!knows(is_async ? *fenced : me.ordered, record.writer)) report(deed_of(record));
    }
    if (is_write) {
        for (const Mark& mark : at.marks) {
            if ((bytes_of(mark.halves) & bytes) == 0 || mark.reader.agent == me.agent) continue;
            if (!knows(me.ordered, mark.reader)) report(deed_of(mark));
        }
        if (at.looks) {
            for (const Access& look : *at.looks) {
                Event which;
                if ((look.bytes & bytes) == 0) continue;
                if (is_unordered(look, me.ordered, me.agent, &which)) report(deed_of(look, which));
            }
            std::erase_if(*at.looks, [bytes](const Access& e) { return (e.bytes & ~bytes) == 0; });
        }
        // The accesses that this write covers need not be kept: a later access that races with one
        // of them also races with this write.
        std::erase_if(at.accesses, [&](const Access& before) {
            return (before.bytes & ~bytes) == 0 && !before.is_async && !is_async;
        });
    }
    add(at.accesses, me, is_write ? Access::kWrite : Access::kRead, bytes, is_async, site);
}

}  // namespace kccl::sim
