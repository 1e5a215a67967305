// Checked calls of all_gather: see collective.h.
#pragma once

#include "../collective.h"

namespace of_all_gather {

// `num_bytes`: of one chunk.
inline void checked(const Rank& rank, int kernel, uint64_t num_bytes, int channel, uint64_t seed,
                    uint64_t misalignment, bool in_place) {
    const int world_size = rank.comm.world_size;
    Buffer in(num_bytes, misalignment);
    Buffer out(world_size * num_bytes, misalignment);
    uint8_t* mine = in_place ? out.data + rank.comm.rank * num_bytes : in.data;
    for (uint64_t i = 0; i < num_bytes; ++i) {
        mine[i] = uint8_t(oracle::mix(seed, rank.comm.rank, i));
    }
    call(rank, kernel, {out.data, mine, num_bytes, 0, channel});
    for (uint64_t i = 0; i < world_size * num_bytes; ++i) {
        check(out.data[i] == uint8_t(oracle::mix(seed, i / num_bytes, i % num_bytes)),
              "kernel %d of %zu bytes: byte %zu on rank %d is wrong", kernel, size_t(num_bytes),
              size_t(i), rank.comm.rank);
    }
}

inline void any_call(const Rank& rank, int kernel, uint64_t num_bytes, int channel, uint64_t seed) {
    checked(rank, kernel, num_bytes, channel, seed, 0, false);
}

inline void matrix(const Rank& rank, int kernel, bool, uint64_t& seed) {
    for (const uint64_t length : kLengths) {
        checked(rank, kernel, length - seed % 8, 0, seed, seed % 3, seed % 5 < 2);
        ++seed;
    }
}

inline constexpr Collective kCollective = {any_call, matrix, true};

}  // namespace of_all_gather
