// What the scenarios of ranks_as_threads.cpp ask of a collective: checked calls, from a description
// of which data goes where. tests/support/moves.py writes the descriptions.
#pragma once

#include <span>
#include <vector>

#include "dtypes.h"
#include "oracle.h"
#include "world.h"

// Chunk `number` of a rank's result, in calls with this world size and peer: the ranks from `first`
// on whose chunk `chunk` it is made of.
struct Part {
    int world_size, peer, rank, number;
    int first, num_terms, chunk;
};

// What KcclCall.peer says.
enum class Takes { kNothing, kRoot, kExclusive };

struct Moves {
    std::span<const Part> parts;
    bool has_chunks;  // x has a chunk for each rank
    bool reduces;
    bool is_in_place;      // x and the result are always one array
    bool only_root_has_x;  // the others pass none
    bool waits_for_all;    // a rank that comes late causes a time-out on every other rank
    Takes takes;
};

// One of the kernels that run a collective. A barrier has no data and no moves.
struct Algorithm {
    int kernel;  // KcclKernel
    const Moves* moves;
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

struct CheckedCall {
    int kernel;
    int dtype;
    int op;
    uint64_t count;  // of a chunk: elements if it reduces, else bytes
    int peer;
    int channel;
    uint64_t seed;
    uint64_t misalignment;
    bool in_place;
};

// Writes element `i` of a chunk-wise numbered x, or of a result that is made of so many ranks' x.
inline void encode(const Moves& moves, const CheckedCall& made, uint8_t* to, int world_size,
                   int first, int num_terms, uint64_t i) {
    if (!moves.reduces) {
        *to = uint8_t(oracle::mix(made.seed, uint64_t(first), i));
        return;
    }
    oracle::encode(to, made.dtype,
                   oracle::reduced(made.op, made.seed, i, world_size, first, num_terms));
}

// One rank's part of a call.
inline void checked(const Rank& rank, const Moves& moves, const CheckedCall& made) {
    const int world_size = rank.comm.world_size, me = rank.comm.rank;
    const uint64_t unit = moves.reduces ? kItemBytes[made.dtype] : 1;
    const uint64_t chunk = made.count * unit;
    std::vector<Part> parts;
    for (const Part& part : moves.parts) {
        const bool is_of_this = part.world_size == world_size && part.peer == made.peer;
        if (is_of_this && part.rank == me) parts.push_back(part);
    }
    const bool has_x = !moves.only_root_has_x || me == made.peer;
    const uint64_t x_bytes = has_x ? chunk * uint64_t(moves.has_chunks ? world_size : 1) : 0;
    const uint64_t out_bytes = chunk * parts.size();
    Buffer in(x_bytes, made.misalignment), out(out_bytes, made.misalignment);
    uint8_t *x = in.data, *result = out.data;
    if ((made.in_place || moves.is_in_place) && x_bytes != 0 && out_bytes != 0) {
        if (x_bytes < out_bytes) {
            x = result + uint64_t(me) * x_bytes;
        } else {
            result = x_bytes == out_bytes ? x : x + uint64_t(me) * out_bytes;
        }
    }
    for (uint64_t i = 0; i < x_bytes / unit; ++i) {
        if (moves.reduces) {
            oracle::encode(x + i * unit, made.dtype,
                           oracle::input(made.op, made.seed, me, i, world_size));
        } else {
            encode(moves, made, x + i, world_size, me, 1, i);
        }
    }
    call(rank, made.kernel, {result, x, made.count, made.peer, made.channel, made.dtype, made.op});
    for (const Part& part : parts) {
        for (uint64_t i = 0; i < made.count; ++i) {
            uint8_t wanted[8];
            encode(moves, made, wanted, world_size, part.first, part.num_terms,
                   uint64_t(part.chunk) * made.count + i);
            check(
                memcmp(result + (uint64_t(part.number) * made.count + i) * unit, wanted, unit) == 0,
                "kernel %d dtype %d op %d count %zu peer %d: element %zu of part %d on rank %d "
                "is wrong",
                made.kernel, made.dtype, made.op, size_t(made.count), made.peer, size_t(i),
                part.number, me);
        }
    }
}

inline int num_peers(const Moves& moves, int world_size) {
    return moves.takes == Takes::kRoot ? world_size : moves.takes == Takes::kExclusive ? 2 : 1;
}

// A checked call: a sum of float32, or plain bytes.
inline void any_call(const Rank& rank, const Algorithm& algorithm, uint64_t num_bytes, int channel,
                     uint64_t seed) {
    if (algorithm.moves == nullptr) {
        call(rank, algorithm.kernel, {nullptr, nullptr, 0, 0, channel});
        return;
    }
    const Moves& moves = *algorithm.moves;
    const auto peers = uint64_t(num_peers(moves, rank.comm.world_size));
    const int peer = int(oracle::mix(seed, 5, 0) % peers);
    checked(rank, moves,
            {algorithm.kernel, kKcclFloat32, kKcclSum, num_bytes / (moves.reduces ? 4 : 1), peer,
             channel, seed, 0, false});
}

// Checked calls with every operator and every length of kLengths. Each takes the next seed.
inline void matrix_of(const Rank& rank, const Algorithm& algorithm, uint64_t& seed) {
    if (algorithm.moves == nullptr) return;
    const Moves& moves = *algorithm.moves;
    const int peers = num_peers(moves, rank.comm.world_size);
    if (!moves.reduces) {
        for (int peer = 0; peer < peers; ++peer) {
            for (const uint64_t length : kLengths) {
                checked(rank, moves,
                        {algorithm.kernel, 0, 0, length - seed % 8, peer, int(seed % 2), seed,
                         seed % 3, seed % 5 < 2});
                ++seed;
            }
        }
        return;
    }
    for (const int dtype : kDtypes) {
        if (algorithm.needs_floats && oracle::is_integer(dtype)) continue;
        for (int op = kKcclSum; op <= kKcclAvg; ++op) {
            if (op == kKcclAvg && oracle::is_integer(dtype)) continue;
            for (const uint64_t length : kLengths) {
                // Every second message is one element shorter. Some begin on odd addresses.
                const uint64_t count = length / kItemBytes[dtype] - (seed % 2 && length > 8);
                checked(rank, moves,
                        {algorithm.kernel, dtype, op, count, int(seed % uint64_t(peers)), 0, seed,
                         seed % 3, seed % 5 < 2});
                ++seed;
            }
        }
    }
}
