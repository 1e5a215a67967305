// Symmetric windows: where a region of any rank's window or scratch lies in this rank's address space.
// Nothing here touches memory.
#pragma once

#include "mem.cuh"

namespace kccl {

KCCL_DEVICE State* state_of(const DeviceComm& comm) { return reinterpret_cast<State*>(comm.state); }

KCCL_DEVICE ChannelState* channel_state(const DeviceComm& comm, int channel) {
    return reinterpret_cast<ChannelState*>(comm.channels) + channel;
}

template <class T>
KCCL_DEVICE T* window_at(const DeviceComm& comm, int rank, uint64_t offset) {
    return reinterpret_cast<T*>(comm.window[rank] + offset);
}

template <class T>
KCCL_DEVICE T* scratch_at(const DeviceComm& comm, int rank, uint64_t offset) {
    return reinterpret_cast<T*>(comm.scratch[rank] + offset);
}

// The word by which `source` says that it gave up, in `rank`'s window.
KCCL_DEVICE uint32_t* abort_word(const DeviceComm& comm, int rank, int source) {
    return window_at<uint32_t>(comm, rank, comm.layout.abort) + source;
}

KCCL_DEVICE Record* abort_record(const DeviceComm& comm, int rank, int source) {
    return window_at<Record>(comm, rank, comm.layout.records + source * kKcclLineBytes);
}

// The word that `source` writes into `rank`'s scratch; a line of its own.
KCCL_DEVICE uint32_t* flag_word(const DeviceComm& comm, int rank, int channel, KcclFlag flag,
                                int source) {
    const uint64_t line = (uint64_t(channel) * kKcclNumFlags + flag) * comm.world_size + source;
    return scratch_at<uint32_t>(comm, rank, comm.layout.flags + line * kKcclLineBytes);
}

// The counter of signals that `source` sent to `rank` under this id; a line of its own.
KCCL_DEVICE uint32_t* signal_word(const DeviceComm& comm, int rank, int signal_id, int source) {
    const uint64_t line = uint64_t(signal_id) * comm.world_size + source;
    return window_at<uint32_t>(comm, rank, comm.layout.signals + line * kKcclLineBytes);
}

// The line in which a block of this rank says how often it has synchronised (grid.cuh); block
// kKcclMaxBlocks: the counter of all.
KCCL_DEVICE uint32_t* grid_line(const DeviceComm& comm, KcclGridWords family, uint32_t block) {
    const uint64_t line = uint64_t(family) * (kKcclMaxBlocks + 1) + block;
    return scratch_at<uint32_t>(comm, comm.rank, comm.layout.grid + line * kKcclLineBytes);
}

// The epoch of the last exchange that a block of this rank has made.
KCCL_DEVICE uint32_t* exchange_epoch(const DeviceComm& comm, KcclReach reach, uint32_t block) {
    const uint64_t place = uint64_t(reach) * kKcclMaxBlocks + block;
    return scratch_at<uint32_t>(comm, comm.rank, comm.layout.exchanges + place * sizeof(uint32_t));
}

// The packets of all blocks in an exchange, of slot 0; those of the others follow.
KCCL_DEVICE mem::Packet* board(const DeviceComm& comm, KcclReach reach, int rank) {
    const uint64_t slots = uint64_t(reach) * kKcclNumExchangeSlots;
    return scratch_at<mem::Packet>(comm, rank,
                                   comm.layout.board + slots * 2 * comm.layout.exchange_bytes);
}

// The packets that `source` pushes into `rank`'s scratch: a slot of 2 * packet_bytes.
// The stride per source is fixed, so a word is only ever written by one rank.
KCCL_DEVICE mem::Packet* packet_slot(const DeviceComm& comm, int rank, int channel, uint32_t parity,
                                     int source) {
    const uint64_t slot = (uint64_t(channel) * 2 + parity) * comm.world_size + source;
    return scratch_at<mem::Packet>(comm, rank,
                                   comm.layout.packets + slot * 2 * comm.layout.packet_bytes);
}

// The sentinel words that `source` pushes into `rank`'s scratch: a slot of packet_bytes.
KCCL_DEVICE mem::Packet* sentinel_slot(const DeviceComm& comm, int rank, int channel, uint32_t slot,
                                       int source) {
    const uint64_t place =
        (uint64_t(channel) * kKcclNumSentinelSlots + slot) * comm.world_size + source;
    return scratch_at<mem::Packet>(comm, rank,
                                   comm.layout.sentinel + place * comm.layout.packet_bytes);
}

enum class Half { kInput = 0, kResult = 1 };

// Where `rank` lays its input, or its part of the result, for peers to pull; or peers lay what they
// push.
template <class T>
KCCL_DEVICE T* staging_slot(const DeviceComm& comm, int rank, int channel, uint32_t parity,
                            Half half) {
    const uint64_t slot = (uint64_t(channel) * 2 + parity) * 2 + static_cast<uint32_t>(half);
    return scratch_at<T>(comm, rank, comm.layout.staging + slot * comm.layout.staging_bytes);
}

// How long the parts of a slot may be that has one for each rank: they begin on lines of their own.
KCCL_DEVICE uint64_t staging_part_bytes(const DeviceComm& comm) {
    return comm.layout.staging_bytes / (uint64_t(comm.world_size) * kKcclLineBytes) *
           kKcclLineBytes;
}

}  // namespace kccl
