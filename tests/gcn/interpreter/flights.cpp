// Accesses on their way: how long they take, in which order they arrive, and what waits for them.
#include <algorithm>

#include "machine.h"

namespace gcn {
namespace {

constexpr uint32_t kChannels = 128, kChannelBytes = 256;

}  // namespace

// ---- Counters ---------------------------------------------------------------------------------

// vmcnt counts down in the order of issue. lgkmcnt does too, but not for scalar loads and flat
// accesses.
bool Machine::are_met(Wave& wave, int vector, int other) const {
    int num_vector = 0, num_other = 0;
    bool vector_blocked = false, other_blocked = false, any_unordered = false;
    int not_done = 0;
    for (const Pending& each : wave.pending) {
        if (each.counts_vector) {
            vector_blocked |= !each.is_done;
            num_vector += vector_blocked ? 1 : 0;
        }
        if (each.counts_other) {
            other_blocked |= !each.is_done;
            any_unordered |= each.is_scalar && !each.is_done;
            num_other += other_blocked ? 1 : 0;
            not_done += each.is_done ? 0 : 1;
        }
    }
    return num_vector <= vector && (any_unordered ? not_done : num_other) <= other;
}

void Machine::mark_waited(Wave& wave, int vector, int other) {
    int vectors = 0, others = 0;
    bool any_scalar = false;
    for (const Pending& each : wave.pending) {
        vectors += each.counts_vector ? 1 : 0;
        others += each.counts_other ? 1 : 0;
        any_scalar |= each.is_scalar;
    }
    // Where scalar loads are among them, only a wait for all says anything.
    const int other_waited = any_scalar && other != 0 ? 0 : std::max(0, others - other);
    int vector_waited = std::max(0, vectors - vector), other_left = other_waited;
    for (Pending& each : wave.pending) {
        if (each.counts_vector && vector_waited > 0) {
            --vector_waited;
            each.counts_vector = false;
        }
        if (each.counts_other && other_left > 0) {
            --other_left;
            each.counts_other = false;
        }
        if (each.counts_vector || each.counts_other) continue;
        for (int i = each.first; i < each.first + each.num; ++i) {
            if (each.is_scalar)
                --wave.awaited_s[i];
            else
                --wave.awaited_v[i];
        }
        each.num = 0;
    }
    std::erase_if(wave.pending, [](const Pending& each) {
        return each.is_done && !each.counts_vector && !each.counts_other;
    });
    if (wave.pending.empty()) wave.lines.clear();
}

void Machine::wait_for(Wave& wave, int vector, int other) {
    if (are_met(wave, vector, other)) {
        mark_waited(wave, vector, other);
        return;
    }
    wave.waits_for_counters = true;
}

// ---- Accesses ---------------------------------------------------------------------------------

void Machine::issue(std::unique_ptr<Access> owned, bool counts_vector, bool counts_other) {
    Access& access = *owned;
    Wave& wave = *access.wave;
    access.id = next_access_++;
    Pending pending = {access.id, counts_vector, counts_other, access.scalar_result >= 0, false, -1,
                       0};
    if (access.kind != Access::Kind::kStore && access.scalar_result >= 0) {
        pending.first = access.scalar_result;
        pending.num = access.num_scalars;
        for (int i = 0; i < pending.num; ++i) ++wave.awaited_s[pending.first + i];
    } else if (access.result >= 0) {
        pending.first = access.result;
        pending.num = access.words;
        for (int i = 0; i < pending.num; ++i) ++wave.awaited_v[pending.first + i];
    }
    wave.pending.push_back(pending);
    Launch& launch = *waiting_[wave.block->rank].front();
    ++launch.num_accesses;

    const Time there = journey(access);
    std::vector<std::pair<uint64_t, uint8_t>> parts;
    const auto all_words = static_cast<uint8_t>((1 << access.words) - 1);
    const bool splits =
        settings_.seed != 0 && access.kind != Access::Kind::kWriteBack && access.scalar_result < 0;
    if (!splits) {
        parts.emplace_back(access.mask, all_words);
    } else {
        // 8 bytes stay together; otherwise lanes and halves go their own way.
        const uint64_t chosen = random_();
        for (const uint64_t lanes : {access.mask & chosen, access.mask & ~chosen}) {
            if (lanes == 0) continue;
            if (access.words <= 2) {
                parts.emplace_back(lanes, all_words);
            } else {
                parts.emplace_back(lanes, static_cast<uint8_t>(all_words & 3));
                parts.emplace_back(lanes, static_cast<uint8_t>(all_words & 12));
            }
        }
        if (parts.empty()) parts.emplace_back(0, all_words);
    }
    access.parts_left = static_cast<int>(parts.size());
    for (const auto& [lanes, words] : parts) {
        // What a write-back finds dirty may be what was so at its beginning, or at its end.
        const bool is_early =
            settings_.seed != 0 && access.kind == Access::Kind::kWriteBack && random_() % 2 == 0;
        const Time on_way =
            is_early ? there * static_cast<Time>(random_() % 64) / 64 : jittered(there);
        const Time arrival = in_order(access, lanes, wave.now + on_way);
        access.done = std::max(access.done, arrival + jittered(there));
        wave.last_arrival = std::max(wave.last_arrival, arrival);
        push({arrival, 0, Event::Kind::kPart, &wave, &access, lanes, words});
    }
    under_way_.emplace(&access, std::move(owned));
}

// How long an access takes until it takes place: half of the way and back, and what it queues for.
Time Machine::journey(Access& access) {
    const Block& block = *access.wave->block;
    const bool writes = access.kind != Access::Kind::kLoad;
    if (access.kind == Access::Kind::kWriteBack) {
        const bool is_clean = memory_.num_dirty(block.die) == 0;
        // What this wave stored before has to be there.
        const Time before = std::max<Time>(0, access.wave->last_arrival - access.wave->now);
        return before + settings_.level2 / 2 + (is_clean ? 0 : settings_.write_back) +
               settings_.local / 2;
    }
    Time longest = access.mask == 0 ? settings_.shared : 0, queued = 0;
    uint64_t last_unit = ~uint64_t{0}, last_piece = ~uint64_t{0};
    int far = -1;
    for (int i = 0; i < kLanes; ++i) {
        if ((access.mask >> i & 1) == 0) continue;
        if (access.space[i] != Access::Space::kMemory) {
            longest = std::max(longest, settings_.shared);
            continue;
        }
        const uint64_t address = access.address[i];
        const int owner =
            memory_.owner(block.rank, address, static_cast<uint64_t>(access.words * access.bytes));
        const bool passes = access.kind == Access::Kind::kAtomic ||
                            memory_.passes(access.scope, block.rank, address);
        if (!passes && access.scope == Scope::kBlock && !writes &&
            memory_.is_in_level1(block.level1, address)) {
            longest = std::max(longest, settings_.level1);
            continue;
        }
        if (!passes && (writes || memory_.is_in_level2(block.die, address))) {
            longest = std::max(longest, settings_.level2);
            continue;
        }
        longest = std::max(longest, owner == block.rank ? settings_.local : settings_.remote);
        // Lanes that touch the same 64 bytes share a request, as do those of a link's 32.
        const uint64_t last_byte = address + static_cast<uint64_t>(access.words * access.bytes) - 1;
        if (address / 64 != last_unit || last_byte / 64 != last_unit ||
            access.kind == Access::Kind::kAtomic) {
            Time& channel = channel_free_[owner][address / kChannelBytes % kChannels];
            channel = std::max(channel, access.wave->now) + (access.kind == Access::Kind::kAtomic
                                                                 ? settings_.channel_atomic
                                                                 : settings_.channel_access);
            queued = std::max(queued, channel - access.wave->now);
            last_unit = last_byte / 64;
        }
        if (owner == block.rank) continue;
        far = owner;
        for (uint64_t piece = address / 32; piece <= last_byte / 32; ++piece) {
            if (piece == last_piece) continue;
            last_piece = piece;
            // Stores go out, what is loaded comes in.
            Time& link = link_free_[writes ? block.rank * settings_.world_size + owner
                                           : owner * settings_.world_size + block.rank];
            link = std::max(link, access.wave->now) + settings_.link_32_bytes;
        }
    }
    if (far >= 0) {
        const Time link = link_free_[writes ? block.rank * settings_.world_size + far
                                            : far * settings_.world_size + block.rank];
        queued = std::max(queued, link - access.wave->now);
    }
    return longest / 2 + queued;
}

// Not before an earlier access of the same wave to the same line, or to block-shared memory.
Time Machine::in_order(Access& access, uint64_t lanes, Time time) {
    Wave& wave = *access.wave;
    if (access.kind == Access::Kind::kWriteBack) return std::max(time, wave.last_arrival + 1);
    uint64_t last = ~uint64_t{0};
    bool uses_shared = false;
    std::vector<uint64_t> touched;
    for (int i = 0; i < kLanes; ++i) {
        if ((lanes >> i & 1) == 0) continue;
        if (access.space[i] != Access::Space::kMemory) {
            uses_shared = true;
            continue;
        }
        const uint64_t first = access.address[i];
        const auto bytes = static_cast<uint64_t>(access.words * access.bytes);
        for (const uint64_t line : {first / kLineBytes, (first + bytes - 1) / kLineBytes}) {
            if (line == last) continue;
            last = line;
            touched.push_back(line);
            for (const auto& [other, arrival] : wave.lines) {
                if (other == line) time = std::max(time, arrival + 1);
            }
        }
    }
    if (uses_shared) {
        time = std::max(time, wave.last_shared + 1);
        wave.last_shared = time;
    }
    for (const uint64_t line : touched) wave.lines.emplace_back(line, time);
    return time;
}

void Machine::finish(Access* access, Time now) {
    Wave& wave = *access->wave;
    for (Pending& each : wave.pending) {
        if (each.id == access->id) each.is_done = true;
    }
    if (access->kind != Access::Kind::kStore) {
        if (access->scalar_result >= 0) {
            for (int k = 0; k < access->num_scalars; ++k)
                wave.s[access->scalar_result + k] = access->data[k / kLanes][k % kLanes];
        }
        for (int k = 0; access->result >= 0 && k < access->words; ++k) {
            Lanes& out = wave.v[access->result + k];
            for (int i = 0; i < kLanes; ++i) {
                if ((access->result_mask >> i & 1) != 0) out[i] = access->data[k][i];
            }
        }
    }
    std::erase_if(wave.pending, [](const Pending& each) {
        return each.is_done && !each.counts_vector && !each.counts_other;
    });
    under_way_.erase(access);
    Launch& launch = *waiting_[wave.block->rank].front();
    --launch.num_accesses;
    if (wave.has_ended) {
        end_launch_if_done(launch, now);
        return;
    }
    if (!wave.waits_for_counters) return;
    const Instruction& in = wave.program->code()[wave.pc - 1];
    if (!are_met(wave, in.vmcnt, in.lgkmcnt)) return;
    mark_waited(wave, in.vmcnt, in.lgkmcnt);
    wave.waits_for_counters = false;
    wave.now = std::max(wave.now, now);
    push({wave.now, 0, Event::Kind::kStep, &wave, nullptr, 0, 0});
}

}  // namespace gcn
