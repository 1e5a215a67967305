// Checked calls of all_reduce: see collective.h.
#pragma once

#include "../collective.h"

namespace of_all_reduce {

inline void checked(const Rank& rank, int kernel, int dtype, int op, uint64_t count, int channel,
                    uint64_t seed, uint64_t misalignment, bool in_place) {
    const int world_size = rank.comm.world_size;
    Buffer in(count * kItemBytes[dtype], misalignment);
    Buffer out(count * kItemBytes[dtype], misalignment);
    for (uint64_t i = 0; i < count; ++i) {
        const int value = oracle::input(op, seed, rank.comm.rank, i, world_size);
        oracle::encode(in.data + i * kItemBytes[dtype], dtype, value);
    }
    uint8_t* result = in_place ? in.data : out.data;
    call(rank, kernel, {result, in.data, count, 0, channel, dtype, op});
    for (uint64_t i = 0; i < count; ++i) {
        uint8_t wanted[8];
        oracle::encode(wanted, dtype, oracle::reduced(op, seed, i, world_size));
        check(memcmp(result + i * kItemBytes[dtype], wanted, kItemBytes[dtype]) == 0,
              "kernel %d dtype %d op %d count %zu: element %zu on rank %d is wrong", kernel, dtype,
              op, size_t(count), size_t(i), rank.comm.rank);
    }
}

inline void any_call(const Rank& rank, int kernel, uint64_t num_bytes, int channel, uint64_t seed) {
    checked(rank, kernel, kKcclFloat32, kKcclSum, num_bytes / 4, channel, seed, 0, false);
}

inline void matrix(const Rank& rank, int kernel, bool needs_floats, uint64_t& seed) {
    matrix_of_reductions(rank, kernel, needs_floats, seed, checked);
}

inline constexpr Collective kCollective = {any_call, matrix, true};

}  // namespace of_all_reduce
