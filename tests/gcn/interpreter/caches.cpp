#include "caches.h"

#include <algorithm>
#include <cstdio>
#include <cstring>

#include "program.h"

namespace gcn {
namespace {

bool has_bytes(const uint64_t (&bits)[2], int at, int bytes) {
    const uint64_t mask = (uint64_t{1} << bytes) - 1;
    return (bits[at / 64] >> (at % 64) & mask) == mask;
}

void set_bytes(uint64_t (&bits)[2], int at, int bytes, bool is_set) {
    const uint64_t mask = ((uint64_t{1} << bytes) - 1) << (at % 64);
    if (is_set)
        bits[at / 64] |= mask;
    else
        bits[at / 64] &= ~mask;
}

// What is not aligned takes place byte by byte: not at once, so nobody may count on its scope.
bool goes_by_bytes(uint64_t address, int bytes, Scope scope) {
    if (address % bytes == 0) return false;
    if (scope != Scope::kBlock) throw Error("an access with a scope that is not aligned");
    return true;
}

int place_in_line(uint64_t address, int bytes) {
    if (address % bytes != 0) throw Error("an atomic access that is not aligned");
    return static_cast<int>(address % kLineBytes);
}

}  // namespace

void Memory::add_region(uint64_t begin, uint64_t bytes, int rank) {
    regions_.push_back({begin, begin + bytes, rank, std::vector<uint8_t>(bytes / 4 + 1)});
    std::sort(regions_.begin(), regions_.end(),
              [](const Region& a, const Region& b) { return a.begin < b.begin; });
}

void Memory::drop_region(uint64_t begin) {
    std::erase_if(regions_, [&](const Region& each) { return each.begin == begin; });
    last_region_ = 0;
}

int Memory::add_level1() {
    level1_.emplace_back();
    return static_cast<int>(level1_.size()) - 1;
}

Region& Memory::region(uint64_t address, uint64_t bytes) {
    if (last_region_ < regions_.size()) {
        Region& last = regions_[last_region_];
        if (address >= last.begin && address + bytes <= last.end) return last;
    }
    const auto behind =
        std::upper_bound(regions_.begin(), regions_.end(), address,
                         [](uint64_t a, const Region& each) { return a < each.begin; });
    if (behind != regions_.begin()) {
        Region& found = *(behind - 1);
        if (address + bytes <= found.end) {
            last_region_ = static_cast<size_t>(behind - 1 - regions_.begin());
            return found;
        }
    }
    char text[64];
    std::snprintf(text, sizeof text, "uses address 0x%llx, which is nobody's",
                  static_cast<unsigned long long>(address));
    throw Error(text);
}

bool Memory::is_in_level1(int level1, uint64_t address) const {
    return level1_[level1].lines.contains(address / kLineBytes);
}

bool Memory::is_in_level2(int die, uint64_t address) const {
    const auto found = dies_[die].lines.find(address / kLineBytes);
    return found != dies_[die].lines.end() &&
           has_bytes(found->second.has, static_cast<int>(address % kLineBytes), 1);
}

// A line of an L2 with all of its bytes. Bytes outside of the regions are never used.
Line& Memory::fetched(int die, uint64_t line) {
    Line& out = dies_[die].lines[line];
    if (out.has[0] == ~uint64_t{0} && out.has[1] == ~uint64_t{0}) return out;
    for (uint64_t at = 0; at < kLineBytes; at += 4) {
        if (has_bytes(out.has, static_cast<int>(at), 4)) continue;
        const uint64_t address = line * kLineBytes + at;
        const auto behind =
            std::upper_bound(regions_.begin(), regions_.end(), address,
                             [](uint64_t a, const Region& each) { return a < each.begin; });
        if (behind == regions_.begin() || address + 4 > (behind - 1)->end) continue;
        const auto* from = reinterpret_cast<const uint8_t*>(address);
        for (int k = 0; k < 4; ++k) {
            if (!has_bytes(out.has, static_cast<int>(at) + k, 1)) out.data[at + k] = from[k];
        }
    }
    out.has[0] = out.has[1] = ~uint64_t{0};
    return out;
}

void Memory::note_writer(uint64_t address, int bytes, int rank, bool is_system) {
    Region& found = region(address, bytes);
    const auto writer = static_cast<uint8_t>((1 + rank) | (is_system ? 0x80 : 0));
    for (uint64_t at = address & ~uint64_t{3}; at < address + bytes; at += 4)
        found.writers[(at - found.begin) / 4] = writer;
}

uint32_t Memory::load(int level1, int die, uint64_t address, int bytes, Scope scope) {
    if (goes_by_bytes(address, bytes, scope)) {
        uint32_t value = 0;
        for (int k = 0; k < bytes; ++k) value |= load(level1, die, address + k, 1, scope) << 8 * k;
        return value;
    }
    const int at = place_in_line(address, bytes);
    const uint64_t line = address / kLineBytes;
    Region& home = region(address, bytes);
    const int rank = die / kDies;
    uint32_t value = 0;
    if (scope == Scope::kAgent) {
        const uint8_t writer = home.writers[(address - home.begin) / 4];
        if (writer != 0 && (writer & 0x7f) != 1 + rank)
            finding = "loads with agent scope what rank " + std::to_string((writer & 0x7f) - 1) +
                      " stored";
    }
    if (passes(scope, rank, address)) {
        // The die sees its own stores, which may be dirty; what else it holds is refreshed.
        level1_[level1].lines.erase(line);
        const auto found = dies_[die].lines.find(line);
        std::memcpy(&value, reinterpret_cast<const void*>(address), bytes);
        if (found != dies_[die].lines.end()) {
            auto* bytes_of = reinterpret_cast<uint8_t*>(&value);
            for (int k = 0; k < bytes; ++k) {
                if (has_bytes(found->second.dirty, at + k, 1))
                    bytes_of[k] = found->second.data[at + k];
                else
                    found->second.data[at + k] = bytes_of[k];
            }
            set_bytes(found->second.has, at, bytes, true);
        }
        return value;
    }
    auto& near = level1_[level1].lines;
    const auto hit = near.find(line);
    if (hit != near.end()) {
        std::memcpy(&value, hit->second.data + at, bytes);
        return value;
    }
    const Line& far = fetched(die, line);
    near.emplace(line, far);
    std::memcpy(&value, far.data + at, bytes);
    return value;
}

void Memory::store(int level1, int die, uint64_t address, int bytes, uint32_t value, Scope scope) {
    if (goes_by_bytes(address, bytes, scope)) {
        for (int k = 0; k < bytes; ++k) store(level1, die, address + k, 1, value >> 8 * k, scope);
        return;
    }
    const int at = place_in_line(address, bytes);
    const uint64_t line = address / kLineBytes;
    if (region(address, bytes).rank == kEveryRank) throw Error("writes a constant");
    // An L1 is written through.
    const auto near = level1_[level1].lines.find(line);
    if (near != level1_[level1].lines.end()) std::memcpy(near->second.data + at, &value, bytes);
    const int rank = die / kDies;
    if (passes(scope, rank, address)) {
        std::memcpy(reinterpret_cast<void*>(address), &value, bytes);
        note_writer(address, bytes, rank, scope == Scope::kSystem);
        const auto found = dies_[die].lines.find(line);
        if (found != dies_[die].lines.end()) {
            std::memcpy(found->second.data + at, &value, bytes);
            set_bytes(found->second.has, at, bytes, true);
            set_bytes(found->second.dirty, at, bytes, false);
        }
        return;
    }
    Line& far = dies_[die].lines[line];
    std::memcpy(far.data + at, &value, bytes);
    set_bytes(far.has, at, bytes, true);
    set_bytes(far.dirty, at, bytes, true);
}

uint64_t Memory::atomic(int level1, int die, uint64_t address, int bytes,
                        uint64_t (*change)(uint64_t, uint64_t, uint64_t), uint64_t a, uint64_t b,
                        Scope scope) {
    const int at = place_in_line(address, bytes);
    const int rank = die / kDies;
    const uint64_t line = address / kLineBytes;
    if (scope != Scope::kSystem && region(address, bytes).rank != rank)
        throw Error("an atomic of agent scope on another rank's memory");
    uint64_t old = 0;
    std::memcpy(&old, reinterpret_cast<const void*>(address), bytes);
    const uint64_t result = change(old, a, b);
    std::memcpy(reinterpret_cast<void*>(address), &result, bytes);
    note_writer(address, bytes, rank, scope == Scope::kSystem);
    level1_[level1].lines.erase(line);
    const auto found = dies_[die].lines.find(line);
    if (found != dies_[die].lines.end()) {
        if (has_bytes(found->second.dirty, at, 1))
            throw Error("an atomic on a word that an L2 cache holds back");
        std::memcpy(found->second.data + at, &result, bytes);
    }
    return old;
}

void Memory::write_back(int die, Scope scope) {
    const int rank = die / kDies;
    for (auto& [line, each] : dies_[die].lines) {
        if ((each.dirty[0] | each.dirty[1]) == 0) continue;
        const uint64_t base = line * kLineBytes;
        for (uint64_t at = 0; at < kLineBytes; ++at) {
            if (!has_bytes(each.dirty, static_cast<int>(at), 1)) continue;
            if (scope != Scope::kSystem && owner(rank, base + at) != rank) continue;
            *reinterpret_cast<uint8_t*>(base + at) = each.data[at];
            note_writer(base + at, 1, rank, scope == Scope::kSystem);
            set_bytes(each.dirty, static_cast<int>(at), 1, false);
        }
    }
}

void Memory::invalidate(int level1, int die, Scope scope) {
    empty_level1(level1);
    if (scope == Scope::kBlock) return;
    const int rank = die / kDies;
    auto& lines = dies_[die].lines;
    for (auto entry = lines.begin(); entry != lines.end();) {
        const auto line = entry->first;
        Line& each = entry->second;
        bool is_own = true;
        if (scope == Scope::kAgent) {
            // A line of another rank's memory stays.
            const uint64_t base = line * kLineBytes;
            is_own = false;
            for (uint64_t at = 0; at < kLineBytes && !is_own; at += 4) {
                const auto behind =
                    std::upper_bound(regions_.begin(), regions_.end(), base + at,
                                     [](uint64_t a, const Region& r) { return a < r.begin; });
                is_own = behind != regions_.begin() && base + at < (behind - 1)->end &&
                         (behind - 1)->rank == rank;
            }
        }
        for (int k = 0; is_own && k < 2; ++k) each.has[k] = each.dirty[k];
        if ((each.has[0] | each.has[1]) == 0)
            entry = lines.erase(entry);
        else
            ++entry;
    }
}

uint64_t Memory::num_dirty(int die) const {
    return static_cast<uint64_t>(std::count_if(
        dies_[die].lines.begin(), dies_[die].lines.end(),
        [](const auto& entry) { return (entry.second.dirty[0] | entry.second.dirty[1]) != 0; }));
}

}  // namespace gcn
