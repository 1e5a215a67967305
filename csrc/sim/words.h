// Halves and bytes of the 8-byte words (granules) in which memory.h counts memory. A set of halves
// has bit 0 for the lower 4 bytes, and bit 1 for the upper ones.
#pragma once

#include "memory.h"

namespace kccl::sim {

constexpr uint64_t kLow = 0xffffffffu;
constexpr uint8_t kHalves[] = {1, 2};

// Returns the halves that an aligned access of 4 or 8 bytes touches.
inline uint8_t halves_of(uint64_t address, uint32_t num_bytes) {
    if (num_bytes == 8) return 3;
    return (address & 4) == 0 ? 1 : 2;
}

// Returns the bytes of some halves, a bit each.
inline uint8_t bytes_of(uint8_t halves) {
    return static_cast<uint8_t>(((halves & 1) != 0 ? 0x0f : 0) | ((halves & 2) != 0 ? 0xf0 : 0));
}

// Returns `old` with these halves of `news` in place of its own.
inline uint64_t merged(uint64_t old, uint64_t news, uint8_t halves) {
    const uint64_t mask = ((halves & 1) != 0 ? kLow : 0) | ((halves & 2) != 0 ? ~kLow : 0);
    return (old & ~mask) | (news & mask);
}

// deed_of() returns an earlier access as a Deed, for a finding.
inline Deed deed_of(const Record& record) {
    return {record.writer,
            record.call,
            record.site,
            record.step,
            record.is_plain ? kKcclSimWrite : kKcclSimStore,
            true};
}
inline Deed deed_of(const Mark& mark) {
    return {mark.reader, mark.call, mark.site, mark.step, kKcclSimLoad, true};
}
inline Deed deed_of(const Access& access, Event event) {
    constexpr KcclSimEventKind kKinds[] = {kKcclSimRead, kKcclSimWrite, kKcclSimLoad};
    return {event, access.call, access.site, access.step, kKinds[access.kind], true};
}

}  // namespace kccl::sim
