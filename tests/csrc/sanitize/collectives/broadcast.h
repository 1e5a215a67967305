// Checked calls of broadcast: see collective.h.
#pragma once

#include "../collective.h"

namespace of_broadcast {

inline void checked(const Rank& rank, int kernel, int root, uint64_t num_bytes, int channel,
                    uint64_t seed, uint64_t misalignment) {
    Buffer buffer(num_bytes, misalignment);
    for (uint64_t i = 0; i < num_bytes; ++i) {
        buffer.data[i] = rank.comm.rank == root ? uint8_t(oracle::mix(seed, 0, i)) : 0;
    }
    call(rank, kernel, {buffer.data, buffer.data, num_bytes, root, channel});
    for (uint64_t i = 0; i < num_bytes; ++i) {
        check(buffer.data[i] == uint8_t(oracle::mix(seed, 0, i)),
              "kernel %d of %zu bytes from %d: byte %zu on rank %d is wrong", kernel,
              size_t(num_bytes), root, size_t(i), rank.comm.rank);
    }
}

inline void any_call(const Rank& rank, int kernel, uint64_t num_bytes, int channel, uint64_t seed) {
    const int root = int(oracle::mix(seed, 5, 0) % uint64_t(rank.comm.world_size));
    checked(rank, kernel, root, num_bytes, channel, seed, 0);
}

inline void matrix(const Rank& rank, int kernel, bool, uint64_t& seed) {
    for (int root = 0; root < rank.comm.world_size; ++root) {
        for (const uint64_t length : kLengths) {
            checked(rank, kernel, root, length - seed % 8, 1, seed, seed % 3);
            ++seed;
        }
    }
}

// The root waits for no rank, so a late rank that is not the root causes no time-out.
inline constexpr Collective kCollective = {any_call, matrix, false};

}  // namespace of_broadcast
