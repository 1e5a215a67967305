// ll16 packets: 8 bytes of payload and the call's epoch twice, in 16 bytes: the data is the signal.
//
//     half 0: { payload[0..3], epoch }      half 1: { payload[4..7], epoch }
//
// Each half is single-copy atomic and carries its own flag, so no fence is needed and a packet may
// tear between its halves. A half is valid when its flag equals the epoch; every payload is legal.
#pragma once

#include "window.cuh"

namespace kccl::ll16 {

constexpr uint64_t kPayloadBytes = 8;

KCCL_DEVICE mem::Packet pack(uint64_t payload, uint32_t epoch) {
    const uint64_t flag = static_cast<uint64_t>(epoch) << 32;
    return {{(payload & 0xffffffffu) | flag, (payload >> 32) | flag}};
}

KCCL_DEVICE bool is_valid(mem::Packet packet, uint32_t epoch) {
    return static_cast<uint32_t>(packet.half[0] >> 32) == epoch &&
           static_cast<uint32_t>(packet.half[1] >> 32) == epoch;
}

// The flag of the half that is missing, for the record of a failed wait.
KCCL_DEVICE uint32_t stale_flag(mem::Packet packet, uint32_t epoch) {
    const uint32_t first = static_cast<uint32_t>(packet.half[0] >> 32);
    return first != epoch ? first : static_cast<uint32_t>(packet.half[1] >> 32);
}

KCCL_DEVICE uint64_t unpack(mem::Packet packet) {
    return (packet.half[0] & 0xffffffffu) | (packet.half[1] << 32);
}

template <class T>
constexpr uint64_t kElements = kPayloadBytes / sizeof(T);

// Packets that carry `count` elements.
template <class T>
KCCL_DEVICE uint64_t num_packets(uint64_t count) {
    return (count + kElements<T> - 1) / kElements<T>;
}

// True when the payload of packet `i` is whole and may be moved as one 8-byte word.
template <class T>
KCCL_DEVICE bool is_one_word(const T* array, uint64_t i, uint64_t count) {
    return (i + 1) * kElements<T> <= count &&
           (platform::kCpu || reinterpret_cast<uint64_t>(array) % kPayloadBytes == 0);
}

// Payload `i` of an array of `count` elements; what lies behind the end is zero.
template <class T>
KCCL_DEVICE uint64_t load_payload(const T* array, uint64_t i, uint64_t count) {
    const T* first = array + i * kElements<T>;
    if (is_one_word(array, i, count)) {
        return mem::load_plain(reinterpret_cast<const uint64_t*>(first));
    }
    T elements[kElements<T>] = {};
    for (uint64_t k = 0; k < kElements<T>; ++k) {
        if (i * kElements<T> + k < count) elements[k] = mem::load_plain(first + k);
    }
    uint64_t payload;
    platform::copy_bytes(&payload, elements, sizeof(payload));
    return payload;
}

template <class T>
KCCL_DEVICE void store_payload(T* array, uint64_t i, uint64_t count, uint64_t payload) {
    T* first = array + i * kElements<T>;
    if (is_one_word(array, i, count)) {
        mem::store_plain(reinterpret_cast<uint64_t*>(first), payload);
        return;
    }
    T elements[kElements<T>];
    platform::copy_bytes(elements, &payload, sizeof(payload));
    for (uint64_t k = 0; k < kElements<T>; ++k) {
        if (i * kElements<T> + k < count) mem::store_plain(first + k, elements[k]);
    }
}

}  // namespace kccl::ll16
