// Computes the addresses, in this rank's address space, of the regions of every rank's window and
// scratch (KcclLayout in abi.inc). No function here loads or stores.
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

// Returns the address of the word in `rank`'s window in which `source` stores a KcclDeparture when
// it gives up or leaves.
KCCL_DEVICE uint32_t* abort_word(const DeviceComm& comm, int rank, int source) {
    return window_at<uint32_t>(comm, rank, comm.layout.abort) + source;
}

KCCL_DEVICE Record* abort_record(const DeviceComm& comm, int rank, int source) {
    return window_at<Record>(comm, rank, comm.layout.records + source * kKcclLineBytes);
}

// Returns the address of the word in `rank`'s scratch in which `source` stores the epochs of
// `flag`. `channel`: a scratch channel; each block of a channel has one of its own
// (Channel::index()). The word has a line of kKcclLineBytes of its own.
KCCL_DEVICE uint32_t* flag_word(const DeviceComm& comm, int rank, int channel, KcclFlag flag,
                                int source) {
    const uint64_t line = (uint64_t(channel) * kKcclNumFlags + flag) * comm.world_size + source;
    return scratch_at<uint32_t>(comm, rank, comm.layout.flags + line * kKcclLineBytes);
}

// Returns the address of the word in `rank`'s window that counts the signals from `source` under
// this id. The word has a line of kKcclLineBytes of its own.
KCCL_DEVICE uint32_t* signal_word(const DeviceComm& comm, int rank, int signal_id, int source) {
    const uint64_t line = uint64_t(signal_id) * comm.world_size + source;
    return window_at<uint32_t>(comm, rank, comm.layout.signals + line * kKcclLineBytes);
}

// Returns the address of the line in which a block of this rank stores its count of syncs, for the
// barriers of `family` (grid.cuh). The lines behind those of all blocks belong to the counters: for
// `block` = kKcclMaxBlocks + 2 * i the line is that of counter i.
KCCL_DEVICE uint32_t* grid_line(const DeviceComm& comm, KcclGridWords family, uint32_t block) {
    const uint64_t line = uint64_t(family) * (kKcclMaxBlocks + kKcclGridCounterLines) + block;
    return scratch_at<uint32_t>(comm, comm.rank, comm.layout.grid + line * kKcclLineBytes);
}

// Returns the address of a mark that is not zero while the block has a GridBarrier open (`what` is
// 0), or a GridExchange (`what` is 1 + its KcclReach). The mark lies in the block's line of
// kKcclGridBarriers, behind the block's count.
KCCL_DEVICE uint32_t* open_mark(const DeviceComm& comm, uint32_t what, uint32_t block) {
    return grid_line(comm, kKcclGridBarriers, block) + 2 + what;
}

// Returns the address of the word in which a block of this rank keeps the epoch of its last
// GridExchange of this reach (with the blocks of one rank, or of all ranks).
KCCL_DEVICE uint32_t* exchange_epoch(const DeviceComm& comm, KcclReach reach, uint32_t block) {
    const uint64_t word = uint64_t(reach) * kKcclMaxBlocks + block;
    return scratch_at<uint32_t>(comm, comm.rank, comm.layout.exchanges + word * sizeof(uint32_t));
}

// Returns the address of slot 0 of the board in `rank`'s scratch, for exchanges of this reach. A
// slot holds the packets of all blocks in one exchange. The other slots follow.
KCCL_DEVICE mem::Packet* board(const DeviceComm& comm, KcclReach reach, int rank) {
    const uint64_t slots = uint64_t(reach) * kKcclNumExchangeSlots;
    return scratch_at<mem::Packet>(comm, rank,
                                   comm.layout.board + slots * 2 * comm.layout.exchange_bytes);
}

// Returns the address in `rank`'s scratch to which `source` pushes its ll16 packets, in calls whose
// epochs have this parity. `channel`: as for flag_word(). The slot is 2 * packet_bytes long,
// because packets are twice as long as their payload. Slots of different sources do not overlap, so
// only one rank ever writes a word.
KCCL_DEVICE mem::Packet* packet_slot(const DeviceComm& comm, int rank, int channel, uint32_t parity,
                                     int source) {
    const uint64_t slot = (uint64_t(channel) * 2 + parity) * comm.world_size + source;
    return scratch_at<mem::Packet>(comm, rank,
                                   comm.layout.packets + slot * 2 * comm.layout.packet_bytes);
}

// Returns the offset, the same in each rank's scratch, at which `source` pushes its sentinel words.
// The slot is packet_bytes long. `turn`: the slot's number; calls use the slots in turn
// (sentinel.cuh).
KCCL_DEVICE uint64_t sentinel_slot(const DeviceComm& comm, int channel, uint32_t turn, int source) {
    const uint64_t slot =
        (uint64_t(channel) * kKcclNumSentinelSlots + turn) * comm.world_size + source;
    return comm.layout.sentinel + slot * comm.layout.packet_bytes;
}

enum class Half { kInput = 0, kResult = 1 };

// Returns the address of a staging slot in `rank`'s scratch, for messages that are too long for
// packets. Calls of even and odd epochs use different slots, and each has a half for input and one
// for results. In protocols that pull, `rank` copies its input, or its part of the result, to the
// slot, and peers read it. In protocols that push, peers write to the slot.
template <class T>
KCCL_DEVICE T* staging_slot(const DeviceComm& comm, int rank, int channel, uint32_t parity,
                            Half half) {
    const uint64_t slot = (uint64_t(channel) * 2 + parity) * 2 + static_cast<uint32_t>(half);
    return scratch_at<T>(comm, rank, comm.layout.staging + slot * comm.layout.staging_bytes);
}

// Returns the length in bytes of one part, if a staging slot is divided into a part for each rank.
// The length is a multiple of a line, so that no two parts share one.
KCCL_DEVICE uint64_t staging_part_bytes(const DeviceComm& comm) {
    return comm.layout.staging_bytes / (uint64_t(comm.world_size) * kKcclLineBytes) *
           kKcclLineBytes;
}

}  // namespace kccl
