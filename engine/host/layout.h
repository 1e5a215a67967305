// Where things lie in a rank's window, and the sizes that follow from a model.
#pragma once

#include "compute.h"

namespace kccl::engine {

constexpr uint64_t kLine = kKcclLineBytes;
constexpr uint32_t kColumns = kKcclEngineMaxColumns;

inline uint32_t panels_for(uint32_t num_rows) { return (num_rows + kRows - 1) / kRows; }

inline uint64_t aligned(uint64_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

// The weights of one op, of each lane that has them; of "head" those of a group.
struct Matrix {
    uint32_t num_columns;
    uint32_t panels_per_lane;
    uint32_t panels_at_once;  // of a unit, which one block computes: 2 where two rows meet
};

inline Matrix matrix_of(const KcclEngineModel& model, uint32_t kind) {
    const uint32_t queries = model.heads * model.head_dim;
    switch (kind) {
        case kKcclEngineQkv:
            return {model.hidden, panels_for(queries + 2 * model.kv_heads * model.head_dim), 1};
        case kKcclEngineOut: return {queries, panels_for(model.hidden), 1};
        case kKcclEngineGateUp: return {model.hidden, 2 * panels_for(model.ffn), 2};
        case kKcclEngineDown: return {model.ffn, panels_for(model.hidden), 1};
        case kKcclEngineHead:
            return {model.hidden, panels_for(model.vocab_size / model.num_head_groups), 1};
        default: return {0, 0, 1};
    }
}

// What the leading block tells all others about the next token.
struct Chosen {
    int32_t id;
    uint32_t end;
    double logprob;
};

// Offsets in the window, the same on all ranks.
struct Window {
    uint64_t embedding = 0;  // BF16 [row][hidden]: this rank's rows
    uint64_t words;          // uint32 [block], a line each: team.h
    uint64_t chosen;         // Chosen: rank 0's counts
    uint64_t cancelled;      // uint32: number of the request to be cancelled: rank 0's counts
    uint64_t verdict;        // uint32: Pass::meet() has what it says; rank 0's counts
    uint64_t messages;       // float or BF16 [slot][lane][column][hidden, padded]
    uint64_t finals;         // float [lane][column][hidden, padded]: normalised residuals
    uint64_t logits;         // float [column of kKcclEngineLogitColumns][vocab_size, padded]
    uint64_t bytes;
};

// How many modules' messages a rank keeps; f is num_in_flight. The messages of module m take slot m
// modulo this. Before a block writes them it has passed the exchange of m-1. If that one received,
// every block has written the messages of m-1-f, and before that has read those of m-2-2f: 2f + 2
// slots suffice. If only every other module sends, the last exchange that received was that of m-2,
// and every block has read the messages of m-4-2f: 2f + 4 slots. Between passes all blocks wait for
// each other.
inline uint32_t num_slots(const KcclEngineModel& model) { return 2 * model.num_in_flight + 4; }

// The most lanes of one rank.
inline uint32_t most_lanes(const KcclEngineModel& model, int world_size) {
    uint32_t most = 0;
    for (int rank = 0; rank < world_size; ++rank) {
        const uint32_t lanes = model.first_lane[rank + 1] - model.first_lane[rank];
        most = lanes > most ? lanes : most;
    }
    return most;
}

inline uint32_t most_rows(const KcclEngineModel& model, int world_size) {
    uint32_t most = 0;
    for (int rank = 0; rank < world_size; ++rank) {
        const uint32_t rows = model.first_row[rank + 1] - model.first_row[rank];
        most = rows > most ? rows : most;
    }
    return most;
}

inline Window window_of(const KcclEngineModel& model, int world_size) {
    const uint64_t vector = uint64_t{padded(model.hidden)} * sizeof(float);
    const uint64_t message = model.rounds_messages != 0 ? vector / 2 : vector;
    const uint64_t lanes = most_lanes(model, world_size);
    Window at;
    uint64_t end = 0;
    const auto add = [&end](uint64_t bytes) {
        const uint64_t begin = end;
        end = aligned(end + bytes);
        return begin;
    };
    at.embedding = add(uint64_t{most_rows(model, world_size)} * model.hidden * sizeof(uint16_t));
    at.words = add(kKcclEngineMaxBlocks * kLine);
    at.chosen = add(sizeof(Chosen));
    at.cancelled = add(sizeof(uint32_t));
    at.verdict = add(sizeof(uint32_t));
    at.messages = add(num_slots(model) * lanes * kColumns * message);
    at.finals = add(lanes * kColumns * vector);
    at.logits = add(uint64_t{kKcclEngineLogitColumns} * padded(model.vocab_size) * sizeof(float));
    at.bytes = end;
    return at;
}

}  // namespace kccl::engine
