// What the scenarios of ranks_as_threads.cpp ask of a collective. Each has a file in collectives/,
// whose namespace of_<collective> has a kCollective.
#pragma once

#include <vector>

#include "dtypes.h"
#include "oracle.h"
#include "world.h"

struct Collective {
    // A checked call: a sum of float32, or plain bytes.
    void (*any_call)(const Rank& rank, int kernel, uint64_t num_bytes, int channel, uint64_t seed);
    // Checked calls with every operator, and every length of kLengths. Each takes the next seed.
    void (*matrix)(const Rank& rank, int kernel, bool needs_floats, uint64_t& seed);
    // Whether a rank that comes late causes a time-out on every other rank.
    bool waits_for_all;
};

// One of the kernels that run a collective.
struct Algorithm {
    int kernel;  // KcclKernel
    const Collective& collective;
    bool needs_floats;
};

// At these lengths in bytes a slot, a packet or a line is filled, cut or overfilled.
constexpr uint64_t kLengths[] = {
    8, 16, 24, 72, kPacketBytes, kStagingBytes - 8, kStagingBytes + 8, 3 * kStagingBytes + 40};

struct Buffer {
    explicit Buffer(uint64_t num_bytes, uint64_t misalignment)
        : bytes(num_bytes + misalignment), data(bytes.data() + misalignment) {}
    // Exactly as long as needed, so that AddressSanitizer guards the end.
    std::vector<uint8_t> bytes;
    uint8_t* data;
};

// Collectives that reduce. HAS_CHUNKS: each rank gets its chunk of the result only, and `count` is
// a chunk's.
template <bool HAS_CHUNKS>
void reduce(const Rank& rank, int kernel, int dtype, int op, uint64_t count, int channel,
            uint64_t seed, uint64_t misalignment, bool in_place) {
    const int world_size = rank.comm.world_size;
    const uint64_t num_inputs = HAS_CHUNKS ? world_size * count : count;
    const uint64_t first = HAS_CHUNKS ? rank.comm.rank * count : 0;
    Buffer in(num_inputs * kItemBytes[dtype], misalignment);
    Buffer out(count * kItemBytes[dtype], misalignment);
    for (uint64_t i = 0; i < num_inputs; ++i) {
        const int value = oracle::input(op, seed, rank.comm.rank, i, world_size);
        oracle::encode(in.data + i * kItemBytes[dtype], dtype, value);
    }
    uint8_t* result = in_place ? in.data + first * kItemBytes[dtype] : out.data;
    call(rank, kernel, {result, in.data, count, 0, channel, dtype, op});
    for (uint64_t i = 0; i < count; ++i) {
        uint8_t wanted[8];
        oracle::encode(wanted, dtype, oracle::reduced(op, seed, first + i, world_size));
        check(memcmp(result + i * kItemBytes[dtype], wanted, kItemBytes[dtype]) == 0,
              "kernel %d dtype %d op %d count %zu: element %zu on rank %d is wrong", kernel, dtype,
              op, size_t(count), size_t(i), rank.comm.rank);
    }
}

template <bool HAS_CHUNKS>
void any_reduction(const Rank& rank, int kernel, uint64_t num_bytes, int channel, uint64_t seed) {
    reduce<HAS_CHUNKS>(rank, kernel, kKcclFloat32, kKcclSum, num_bytes / 4, channel, seed, 0,
                       false);
}

template <bool HAS_CHUNKS>
void matrix_of_reductions(const Rank& rank, int kernel, bool needs_floats, uint64_t& seed) {
    for (const int dtype : kDtypes) {
        if (needs_floats && oracle::is_integer(dtype)) continue;
        for (int op = 0; op < kKcclNumOps; ++op) {
            if (op == kKcclAvg && oracle::is_integer(dtype)) continue;
            for (const uint64_t length : kLengths) {
                // Every second message is one element shorter. Some begin on odd addresses.
                const uint64_t count = length / kItemBytes[dtype] - (seed % 2 && length > 8);
                reduce<HAS_CHUNKS>(rank, kernel, dtype, op, count, 0, seed, seed % 3, seed % 5 < 2);
                ++seed;
            }
        }
    }
}

template <bool HAS_CHUNKS>
constexpr Collective kReduction = {any_reduction<HAS_CHUNKS>, matrix_of_reductions<HAS_CHUNKS>,
                                   true};
