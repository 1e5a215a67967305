// Makes a KcclDeviceComm, for Python (csrc/host/api.inc) and for programs without Python
// (host.hpp).
#pragma once

#include "abi.h"

namespace kccl {

static_assert(kKcclLeastStagingBytes == kKcclMaxWorldSize * kKcclLineBytes,
              "abi.inc spells it as a literal because cffi reads it");

// The number of control lines before each ring of messages (messages.cuh). They are about the
// messages that this rank sends to the ring's source: in one line the source says how much of them
// it has taken, in the other one which long messages it has read (their tickets).
constexpr uint64_t kMessageLines = 2;
// The least length of a ring. The longest record must fit although a record may skip the rest of
// the ring at its end, and although the receiver may have taken a quarter of the ring without
// telling the sender.
constexpr uint64_t kMostRecordBytes = 8192;
constexpr uint64_t kLeastMessageBytes = 4 * kMostRecordBytes;
static_assert(kKcclMessageTickets * sizeof(uint32_t) == kKcclLineBytes, "tickets fill a line");

// Tells whether a layout can have regions of these sizes.
constexpr bool fits_layout(const KcclSizes& sizes) {
    return sizes.packet_bytes % kKcclPacketUnit == 0 && sizes.staging_bytes % kKcclLineBytes == 0 &&
           sizes.staging_bytes >= kKcclLeastStagingBytes &&
           sizes.staging_bytes <= uint64_t{1} << 31 && sizes.exchange_bytes % kKcclLineBytes == 0 &&
           (sizes.message_bytes & (sizes.message_bytes - 1)) == 0 &&
           (sizes.message_bytes == 0 || sizes.message_bytes >= kLeastMessageBytes);
}

// Returns where each region of a rank's memory begins. fits_layout() must be true for the sizes.
// page_bytes: the machine's page size.
constexpr KcclLayout layout(uint64_t world_size, const KcclSizes& sizes, uint64_t page_bytes) {
    KcclLayout regions = {};
    uint64_t end = 0;
    // Each region begins on a page of its own, because regions are written in different patterns.
    const auto take = [&](uint64_t num_bytes) {
        const uint64_t begin = end;
        end += (num_bytes + page_bytes - 1) / page_bytes * page_bytes;
        return begin;
    };
    const uint64_t line = kKcclLineBytes;
    const uint64_t num_channels = uint64_t{sizes.num_channels} * sizes.blocks_per_channel;
    const uint64_t slots = num_channels * 2;
    regions.abort = take(line);
    regions.records = take(world_size * line);
    regions.signals = take(kKcclNumSignals * world_size * line);
    regions.flags = take(num_channels * kKcclNumFlags * world_size * line);
    regions.grid =
        take(uint64_t{kKcclNumGridWords} * (kKcclMaxBlocks + kKcclGridCounterLines) * line);
    regions.exchanges = take(uint64_t{kKcclNumReaches} * kKcclMaxBlocks * sizeof(uint32_t));
    if (sizes.message_bytes != 0) {
        regions.messages = take(world_size * (kMessageLines * line + sizes.message_bytes));
    }
    regions.packets = take(slots * world_size * 2 * sizes.packet_bytes);
    regions.staging = take(slots * 2 * sizes.staging_bytes);
    regions.board =
        take(uint64_t{kKcclNumReaches} * kKcclNumExchangeSlots * 2 * sizes.exchange_bytes);
    regions.sentinel = take(num_channels * kKcclNumSentinelSlots * world_size * sizes.packet_bytes);
    regions.packet_bytes = sizes.packet_bytes;
    regions.staging_bytes = sizes.staging_bytes;
    regions.exchange_bytes = sizes.exchange_bytes;
    regions.message_bytes = sizes.message_bytes;
    regions.scratch_bytes = end;
    return regions;
}

// Returns the sizes of a communicator for calls in users' kernels; fits_layout() is true for them.
// max_bytes: the most bytes of one coop's message. exchange_bytes: the bytes of all slices of an
// exchange of the grid (publish.cuh).
constexpr KcclSizes sizes_for_kernels(uint32_t channels, uint64_t max_bytes,
                                      uint64_t exchange_bytes) {
    const auto rounded_up = [](uint64_t num_bytes, uint64_t unit) {
        return (num_bytes + unit - 1) / unit * unit;
    };
    KcclSizes sizes = {};
    sizes.num_channels = channels;
    sizes.blocks_per_channel = 1;
    sizes.epoch_bits = 32;
    sizes.packet_bytes = rounded_up(max_bytes, kKcclPacketUnit);
    sizes.staging_bytes = kKcclLeastStagingBytes;
    sizes.exchange_bytes = rounded_up(exchange_bytes, kKcclLineBytes);
    return sizes;
}

// The addresses of memory, as one rank maps them.
struct Addresses {
    const uint64_t* windows;    // the window of every rank, in rank order
    const uint64_t* scratches;  // the scratch of every rank, in rank order
    uint64_t state;             // this rank's KcclState
    uint64_t channels;          // this rank's KcclChannelState, one for each block of each channel
};

// Returns the DeviceComm of one rank. polls_per_check: how many times a wait polls between two
// reads of the clock.
constexpr KcclDeviceComm make_comm(int rank, int world_size, const KcclSizes& sizes,
                                   const Addresses& addresses, uint64_t page_bytes,
                                   uint32_t polls_per_check) {
    KcclDeviceComm comm = {};
    comm.abi_version = kKcclAbiVersion;
    comm.rank = rank;
    comm.world_size = world_size;
    comm.num_channels = static_cast<int32_t>(sizes.num_channels);
    comm.blocks_per_channel = static_cast<int32_t>(sizes.blocks_per_channel);
    comm.epoch_step = uint32_t{1} << (32 - sizes.epoch_bits);
    comm.polls_per_check = polls_per_check;
    comm.grid_counters = kKcclGridCounters;
    comm.state = addresses.state;
    comm.channels = addresses.channels;
    for (int peer = 0; peer < world_size; ++peer) {
        comm.window[peer] = addresses.windows[peer];
        comm.scratch[peer] = addresses.scratches[peer];
    }
    comm.layout = layout(static_cast<uint64_t>(world_size), sizes, page_bytes);
    return comm;
}

}  // namespace kccl
