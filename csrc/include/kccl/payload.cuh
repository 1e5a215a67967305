// How a message is divided. A payload is 8 bytes of consecutive elements, as much as one ll16
// packet or one sentinel word carries. A slice is the part of one block of the grid. A round is as
// much of a slice as one call may move.
#pragma once

#include "coop.cuh"

namespace kccl {

constexpr uint32_t kPayloadBytes = 8;

// The length of arrays with an entry for each rank. WORLD_SIZE: the number of ranks; 0 if unknown.
template <int WORLD_SIZE>
constexpr int kMaxRanks = WORLD_SIZE > 0 ? WORLD_SIZE : kKcclMaxWorldSize;

// A unit is what a reduction computes at a time: one payload, or the two payloads of one element if
// an element is longer than a payload.
template <class T>
constexpr uint32_t kUnitPayloads = sizeof(T) > kPayloadBytes ? sizeof(T) / kPayloadBytes : 1;
template <class T>
constexpr uint32_t kUnitElements = kUnitPayloads<T> * kPayloadBytes / sizeof(T);

// Returns the number of elements in `payloads` payloads, which are whole units.
template <class T>
KCCL_DEVICE uint32_t num_elements(uint32_t payloads) {
    return payloads / kUnitPayloads<T> * kUnitElements<T>;
}

// Returns the number of units that hold `count` elements. The last one may be partly filled.
template <class T>
KCCL_DEVICE uint32_t num_units(uint32_t count) {
    return (count + kUnitElements<T> - 1) / kUnitElements<T>;
}

// Returns the number of payloads in the units that hold `count` elements.
template <class T>
KCCL_DEVICE uint32_t num_payloads(uint32_t count) {
    return num_units<T>(count) * kUnitPayloads<T>;
}

// Returns true if payloads [i, i + n) are whole and aligned, so that they may be moved as 8-byte
// words.
template <class T>
KCCL_DEVICE bool are_words(const T* array, uint32_t i, uint32_t n, uint32_t count) {
    return num_elements<T>(i + n) <= count &&
           (platform::kCpu || reinterpret_cast<uint64_t>(array) % kPayloadBytes == 0);
}

// Returns true if all payloads of an array of `count` elements are whole and aligned.
template <class T>
KCCL_DEVICE bool are_words(const T* array, uint32_t count) {
    return count % kUnitElements<T> == 0 &&
           (platform::kCpu || reinterpret_cast<uint64_t>(array) % kPayloadBytes == 0);
}

// Returns true if all payloads of several arrays of `count` elements are whole and aligned. The
// arrays begin `stride` elements apart; `arrays` is the first.
template <class T>
KCCL_DEVICE bool are_words(const T* arrays, uint64_t stride, uint32_t count) {
    return are_words(arrays, count) && (platform::kCpu || stride % kUnitElements<T> == 0);
}

// Returns true if the N payloads at `first` may be moved by one access of 16 bytes. They must be
// whole and aligned: see are_words().
template <uint32_t N>
KCCL_DEVICE bool is_line(const void* first) {
    return N == 2 && !platform::kCpu && reinterpret_cast<uint64_t>(first) % sizeof(mem::Line) == 0;
}

// Loads the last num_bytes bytes of an array, fewer than a payload has, as the first bytes of a
// payload. The others are zero. For CPUs: takes three loads at most, from any address.
KCCL_DEVICE uint64_t load_tail(const uint8_t* from, uint32_t num_bytes) {
    uint64_t payload = 0;
    uint32_t done = 0;
    if ((num_bytes & 4) != 0) {
        payload = mem::load_plain(reinterpret_cast<const uint32_t*>(from));
        done = 4;
    }
    if ((num_bytes & 2) != 0) {
        const uint64_t pair = mem::load_plain(reinterpret_cast<const uint16_t*>(from + done));
        payload |= pair << 8 * done;
        done += 2;
    }
    if ((num_bytes & 1) != 0) payload |= uint64_t{mem::load_plain(from + done)} << 8 * done;
    return payload;
}

// Stores the first num_bytes bytes of a payload, fewer than all. For CPUs, as load_tail() is.
KCCL_DEVICE void store_tail(uint8_t* to, uint32_t num_bytes, uint64_t payload) {
    if ((num_bytes & 4) != 0) {
        mem::store_plain(reinterpret_cast<uint32_t*>(to), static_cast<uint32_t>(payload));
        payload >>= 32;
        to += 4;
    }
    if ((num_bytes & 2) != 0) {
        mem::store_plain(reinterpret_cast<uint16_t*>(to), static_cast<uint16_t>(payload));
        payload >>= 16;
        to += 2;
    }
    if ((num_bytes & 1) != 0) mem::store_plain(to, static_cast<uint8_t>(payload));
}

// An array of `count` bytes consists of payloads. Calls move(n, num_bytes) for payload i + n, for
// each n < N, unless the array ends before it. num_bytes: the payload's bytes, fewer for the last.
template <uint32_t N, class Move>
KCCL_DEVICE void each_of(uint32_t i, uint32_t count, Move move) {
    for (uint32_t n = 0; n < N; ++n) {
        const uint32_t begin = (i + n) * kPayloadBytes;
        if (begin >= count) break;
        move(n, count - begin < kPayloadBytes ? count - begin : kPayloadBytes);
    }
}

// Loads payloads [i, i + N), which are whole units, of an array of `count` elements. Bytes of
// payloads that lie behind the end of the array become zero.
template <class T, uint32_t N>
KCCL_DEVICE void load_payloads(uint64_t (&payloads)[N], const T* array, uint32_t i,
                               uint32_t count) {
    [[maybe_unused]] constexpr uint32_t kCount = N * kPayloadBytes / sizeof(T);
    const T* first = array + num_elements<T>(i);
    if (are_words(array, i, N, count)) {
        if (is_line<N>(first)) {
            const mem::Line line = mem::load_plain(reinterpret_cast<const mem::Line*>(first));
            for (uint32_t n = 0; n < N; ++n) payloads[n] = line.word[n];
            return;
        }
        for (uint32_t n = 0; n < N; ++n) {
            payloads[n] = mem::load_plain(reinterpret_cast<const uint64_t*>(first) + n);
        }
        return;
    }
    if constexpr (platform::kCpu && sizeof(T) == 1) {
        for (uint32_t n = 0; n < N; ++n) payloads[n] = 0;
        each_of<N>(i, count, [&](uint32_t n, uint32_t num_bytes) {
            const auto* from = reinterpret_cast<const uint8_t*>(first) + n * kPayloadBytes;
            payloads[n] = num_bytes == kPayloadBytes
                              ? mem::load_plain(reinterpret_cast<const uint64_t*>(from))
                              : load_tail(from, num_bytes);
        });
    } else {
        T elements[kCount] = {};
        for (uint32_t k = 0; k < kCount; ++k) {
            if (num_elements<T>(i) + k < count) elements[k] = mem::load_plain(first + k);
        }
        platform::copy_bytes(payloads, elements, sizeof(payloads));
    }
}

// Stores payloads [i, i + N) of an array of `count` elements, except the bytes that lie behind the
// end of the array.
template <class T, uint32_t N>
KCCL_DEVICE void store_payloads(T* array, uint32_t i, uint32_t count,
                                const uint64_t (&payloads)[N]) {
    [[maybe_unused]] constexpr uint32_t kCount = N * kPayloadBytes / sizeof(T);
    T* first = array + num_elements<T>(i);
    if (are_words(array, i, N, count)) {
        if (is_line<N>(first)) {
            mem::Line line;
            for (uint32_t n = 0; n < N; ++n) line.word[n] = payloads[n];
            mem::store_plain(reinterpret_cast<mem::Line*>(first), line);
            return;
        }
        for (uint32_t n = 0; n < N; ++n) {
            mem::store_plain(reinterpret_cast<uint64_t*>(first) + n, payloads[n]);
        }
        return;
    }
    if constexpr (platform::kCpu && sizeof(T) == 1) {
        each_of<N>(i, count, [&](uint32_t n, uint32_t num_bytes) {
            auto* to = reinterpret_cast<uint8_t*>(first) + n * kPayloadBytes;
            if (num_bytes == kPayloadBytes) {
                mem::store_plain(reinterpret_cast<uint64_t*>(to), payloads[n]);
            } else {
                store_tail(to, num_bytes, payloads[n]);
            }
        });
    } else {
        T elements[kCount];
        platform::copy_bytes(elements, payloads, sizeof(payloads));
        for (uint32_t k = 0; k < kCount; ++k) {
            if (num_elements<T>(i) + k < count) mem::store_plain(first + k, elements[k]);
        }
    }
}

// The part of a message that one block moves, in elements. It begins at the first element of a
// packet.
struct Slice {
    uint64_t begin;
    uint64_t count;
};

// Returns a block's slice of `count` elements if each block gets `share` of them. The last slices
// may be shorter or empty.
KCCL_DEVICE Slice slice_of(uint64_t count, uint64_t share,
                           uint32_t block = platform::block_in_grid()) {
    const uint64_t begin = block * share < count ? block * share : count;
    const uint64_t rest = count - begin;
    return {begin, rest < share ? rest : share};
}

// Returns this block's slice when the message is divided evenly among the blocks of the grid. The
// share of a block is rounded up to a multiple of 16 bytes, so the last slices may be shorter or
// empty.
template <class T>
KCCL_DEVICE Slice block_slice(uint64_t count) {
    constexpr uint64_t kUnit = 16 / sizeof(T);
    const uint64_t num_units = (count + kUnit - 1) / kUnit;
    const uint64_t blocks = platform::blocks_per_grid();
    return slice_of(count, (num_units + blocks - 1) / blocks * kUnit);
}

// Returns this block's slice of a call that the host launched. The host has computed the share,
// because a division here would delay the first push.
template <class T>
KCCL_DEVICE Slice call_slice(const Call& call) {
    constexpr uint64_t kUnit = 16 / sizeof(T);
    return slice_of(call.count, call.share == 0 ? call.count : call.share * kUnit);
}

template <class T>
KCCL_DEVICE T* output_of(const Call& call) {
    return reinterpret_cast<T*>(call.output);
}

template <class T>
KCCL_DEVICE const T* input_of(const Call& call) {
    return reinterpret_cast<const T*>(call.input);
}

// Prefetches the data that this thread sends first, while the channel is being opened.
template <class T>
KCCL_DEVICE void prefetch_slice(const Call& call, const Slice& slice) {
    const uint64_t i = uint64_t{block().index()} * kUnitElements<T>;
    if (i < slice.count) mem::prefetch(input_of<T>(call) + slice.begin + i);
}

// Makes a call on a slice in rounds of at most max_bytes. Each round is a call of its own on the
// channel: round(out, in, count) -> Status. in_rounds() must be the last call in the kernel. If
// EXPECTS_END, it calls Channel::expect_end() before the last round, except on targets where that
// would spill registers. Returns the status of the first round that fails, else ok.
template <class T, bool EXPECTS_END = true, class Channel, class Round>
KCCL_DEVICE Status in_rounds(Channel& channel, const Call& call, const Slice& slice,
                             uint64_t max_bytes, Round round) {
    const uint64_t most = max_bytes / sizeof(T);
    // Most calls have one round. This path waits only for its input before it pushes.
    if (platform::kPeels && slice.count <= most) {
        if (slice.count == 0) return kKcclOk;
        if (EXPECTS_END) channel.expect_end();
        return round(output_of<T>(call) + slice.begin, input_of<T>(call) + slice.begin,
                     static_cast<uint32_t>(slice.count));
    }
    for (uint64_t done = 0; done < slice.count; done += most) {
        const uint64_t begin = slice.begin + done;
        const uint64_t rest = slice.count - done;
        const auto count = static_cast<uint32_t>(rest < most ? rest : most);
        // On targets with the path above for one round, only that path calls expect_end(): in this
        // loop the call would need more registers.
        if (EXPECTS_END && platform::kExpectsEnd && !platform::kPeels && rest <= most) {
            channel.expect_end();
        }
        const Status status = round(output_of<T>(call) + begin, input_of<T>(call) + begin, count);
        if (status != kKcclOk) return status;
    }
    return kKcclOk;
}

// Loads payload i, for elements of at most 8 bytes. is_word: the caller knows that the payload is
// whole and aligned.
template <class T>
KCCL_DEVICE uint64_t load_payload(const T* array, uint32_t i, uint32_t count, bool is_word) {
    if (is_word) return mem::load_plain(reinterpret_cast<const uint64_t*>(array) + i);
    uint64_t payload[1];
    load_payloads(payload, array, i, count);
    return payload[0];
}

template <class T>
KCCL_DEVICE void store_payload(T* array, uint32_t i, uint32_t count, uint64_t payload,
                               bool is_word) {
    const uint64_t payloads[1] = {payload};
    if (is_word) {
        mem::store_plain(reinterpret_cast<uint64_t*>(array) + i, payload);
    } else {
        store_payloads(array, i, count, payloads);
    }
}

// Loads unit i. are_words: the caller knows that its payloads are whole and aligned.
template <class T>
KCCL_DEVICE void load_unit(uint64_t (&unit)[kUnitPayloads<T>], const T* array, uint32_t i,
                           uint32_t count, bool are_words) {
    if constexpr (kUnitPayloads<T> == 1) {
        unit[0] = load_payload(array, i, count, are_words);
    } else {
        load_payloads(unit, array, i * kUnitPayloads<T>, count);
    }
}

template <class T>
KCCL_DEVICE void store_unit(T* array, uint32_t i, uint32_t count,
                            const uint64_t (&unit)[kUnitPayloads<T>], bool are_words) {
    if constexpr (kUnitPayloads<T> == 1) {
        store_payload(array, i, count, unit[0], are_words);
    } else {
        store_payloads(array, i * kUnitPayloads<T>, count, unit);
    }
}

}  // namespace kccl
