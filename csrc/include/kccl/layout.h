// Where each region of a rank's scratch begins: computed here for Python (kccl/ranks/windows.py) and for
// programs without it (host.hpp).
#pragma once

#include "abi.h"

namespace kccl {

static_assert(kKcclLeastStagingBytes == kKcclMaxWorldSize * kKcclLineBytes,
              "abi.inc spells it as a literal because cffi reads it");

// Whether a layout can have slots of these sizes.
constexpr bool fits_layout(uint64_t packet_bytes, uint64_t staging_bytes, uint64_t exchange_bytes) {
    return packet_bytes % kKcclPacketUnit == 0 && staging_bytes % kKcclLineBytes == 0 &&
           staging_bytes >= kKcclLeastStagingBytes && staging_bytes <= uint64_t{1} << 31 &&
           exchange_bytes % kKcclLineBytes == 0;
}

// num_channels: scratch channels, those of calls times the blocks of each. packet_bytes: payload
// bytes of one ll16 or sentinel slot. staging_bytes: of one staging slot. exchange_bytes: of
// all slices of an exchange. page_bytes: of the machine. The sizes fit.
constexpr KcclLayout layout(uint64_t world_size, uint64_t num_channels, uint64_t packet_bytes,
                            uint64_t staging_bytes, uint64_t exchange_bytes, uint64_t page_bytes) {
    KcclLayout regions = {};
    uint64_t end = 0;
    // Pages of their own, because each region is written in another pattern.
    const auto take = [&](uint64_t num_bytes) {
        const uint64_t begin = end;
        end += (num_bytes + page_bytes - 1) / page_bytes * page_bytes;
        return begin;
    };
    const uint64_t line = kKcclLineBytes;
    const uint64_t slots = num_channels * 2;
    regions.abort = take(line);
    regions.records = take(world_size * line);
    regions.signals = take(kKcclNumSignals * world_size * line);
    regions.flags = take(num_channels * kKcclNumFlags * world_size * line);
    regions.grid = take(uint64_t{kKcclNumGridWords} * (kKcclMaxBlocks + 1) * line);
    regions.exchanges = take(uint64_t{kKcclNumReaches} * kKcclMaxBlocks * sizeof(uint32_t));
    regions.packets = take(slots * world_size * 2 * packet_bytes);
    regions.staging = take(slots * 2 * staging_bytes);
    regions.board = take(uint64_t{kKcclNumReaches} * kKcclNumExchangeSlots * 2 * exchange_bytes);
    regions.sentinel = take(num_channels * kKcclNumSentinelSlots * world_size * packet_bytes);
    regions.packet_bytes = packet_bytes;
    regions.staging_bytes = staging_bytes;
    regions.exchange_bytes = exchange_bytes;
    regions.scratch_bytes = end;
    return regions;
}

}  // namespace kccl
