// ll16 packets: 8 bytes of payload, and the call's epoch twice as a flag, in 16 bytes. The data is
// its own signal.
//
//     half 0: { payload[0..3], epoch }      half 1: { payload[4..7], epoch }
//
// Each half is single-copy atomic and carries a flag. So no fence is needed, and a packet may be
// torn between its halves. A half is valid when its flag equals the epoch. Any payload bits are
// allowed.
#pragma once

#include "payload.cuh"
#include "window.cuh"

namespace kccl::ll16 {

KCCL_DEVICE mem::Packet pack(uint64_t payload, uint32_t epoch) {
    const uint64_t flag = static_cast<uint64_t>(epoch) << 32;
    return {{(payload & 0xffffffffu) | flag, (payload >> 32) | flag}};
}

KCCL_DEVICE bool is_valid(mem::Packet packet, uint32_t epoch) {
    return static_cast<uint32_t>(packet.half[0] >> 32) == epoch &&
           static_cast<uint32_t>(packet.half[1] >> 32) == epoch;
}

// Returns the flag of a half that is not valid, for the record of a failed wait.
KCCL_DEVICE uint32_t stale_flag(mem::Packet packet, uint32_t epoch) {
    const uint32_t first = static_cast<uint32_t>(packet.half[0] >> 32);
    return first != epoch ? first : static_cast<uint32_t>(packet.half[1] >> 32);
}

KCCL_DEVICE uint64_t unpack(mem::Packet packet) {
    return (packet.half[0] & 0xffffffffu) | (packet.half[1] << 32);
}

}  // namespace kccl::ll16
