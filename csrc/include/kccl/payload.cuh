// Messages as payloads: 8 bytes of consecutive elements, what one ll16 packet and one sentinel word
// carry.
#pragma once

#include "mem.cuh"

namespace kccl {

constexpr uint64_t kPayloadBytes = 8;

template <class T>
constexpr uint64_t kPayloadElements = kPayloadBytes / sizeof(T);

// Payloads that hold `count` elements.
template <class T>
KCCL_DEVICE uint64_t num_payloads(uint64_t count) {
    return (count + kPayloadElements<T> - 1) / kPayloadElements<T>;
}

// True when payloads [i, i + n) are whole and may be moved as 8-byte words.
template <class T>
KCCL_DEVICE bool are_words(const T* array, uint64_t i, uint64_t n, uint64_t count) {
    return (i + n) * kPayloadElements<T> <= count &&
           (platform::kCpu || reinterpret_cast<uint64_t>(array) % kPayloadBytes == 0);
}

// Payloads [i, i + N) of an array of `count` elements; what lies behind the end is zero.
template <class T, uint64_t N>
KCCL_DEVICE void load_payloads(uint64_t (&payloads)[N], const T* array, uint64_t i,
                               uint64_t count) {
    constexpr uint64_t kCount = N * kPayloadElements<T>;
    const T* first = array + i * kPayloadElements<T>;
    if (are_words(array, i, N, count)) {
        for (uint64_t n = 0; n < N; ++n) {
            payloads[n] = mem::load_plain(reinterpret_cast<const uint64_t*>(first) + n);
        }
        return;
    }
    T elements[kCount] = {};
    for (uint64_t k = 0; k < kCount; ++k) {
        if (i * kPayloadElements<T> + k < count) elements[k] = mem::load_plain(first + k);
    }
    platform::copy_bytes(payloads, elements, sizeof(payloads));
}

// Stores payloads [i, i + N) of an array of `count` elements, as far as they lie before the end.
template <class T, uint64_t N>
KCCL_DEVICE void store_payloads(T* array, uint64_t i, uint64_t count,
                                const uint64_t (&payloads)[N]) {
    constexpr uint64_t kCount = N * kPayloadElements<T>;
    T* first = array + i * kPayloadElements<T>;
    if (are_words(array, i, N, count)) {
        for (uint64_t n = 0; n < N; ++n) {
            mem::store_plain(reinterpret_cast<uint64_t*>(first) + n, payloads[n]);
        }
        return;
    }
    T elements[kCount];
    platform::copy_bytes(elements, payloads, sizeof(payloads));
    for (uint64_t k = 0; k < kCount; ++k) {
        if (i * kPayloadElements<T> + k < count) mem::store_plain(first + k, elements[k]);
    }
}

template <class T>
KCCL_DEVICE uint64_t load_payload(const T* array, uint64_t i, uint64_t count) {
    uint64_t payload[1];
    load_payloads(payload, array, i, count);
    return payload[0];
}

template <class T>
KCCL_DEVICE void store_payload(T* array, uint64_t i, uint64_t count, uint64_t payload) {
    const uint64_t payloads[1] = {payload};
    store_payloads(array, i, count, payloads);
}

}  // namespace kccl
