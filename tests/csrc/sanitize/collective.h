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

// A checked call of a collective that reduces.
using Reduce = void(const Rank& rank, int kernel, int dtype, int op, uint64_t count, int channel,
                    uint64_t seed, uint64_t misalignment, bool in_place);

// The matrix of such a collective.
inline void matrix_of_reductions(const Rank& rank, int kernel, bool needs_floats, uint64_t& seed,
                                 Reduce* reduce) {
    for (const int dtype : kDtypes) {
        if (needs_floats && oracle::is_integer(dtype)) continue;
        for (int op = 0; op < kKcclNumOps; ++op) {
            if (op == kKcclAvg && oracle::is_integer(dtype)) continue;
            for (const uint64_t length : kLengths) {
                // Every second message is one element shorter. Some begin on odd addresses.
                const uint64_t count = length / kItemBytes[dtype] - (seed % 2 && length > 8);
                reduce(rank, kernel, dtype, op, count, 0, seed, seed % 3, seed % 5 < 2);
                ++seed;
            }
        }
    }
}
