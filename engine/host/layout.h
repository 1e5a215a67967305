// The layout of a rank's window, which is the memory that all ranks access, and the sizes that
// follow from a model.
#pragma once

#include <iterator>

#include "compute.h"

namespace kccl::engine {

constexpr uint64_t kLine = kKcclLineBytes;
constexpr uint32_t kColumns = kKcclEngineMaxColumns;

inline uint32_t panels_for(uint32_t num_rows) { return (num_rows + kRows - 1) / kRows; }

inline uint64_t aligned(uint64_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

// The shape of an op's weights in one lane, in panels of 16 rows (products.h). For the head it is
// that of one part of the vocabulary, for experts that of one expert.
struct Matrix {
    uint32_t num_columns;
    uint32_t panels_per_lane;
    uint32_t panels_at_once;  // panels of a work item, which one block computes; gate and up: 2
};

inline Matrix matrix_of(const KcclEngineModel& model, uint32_t kind) {
    const uint32_t queries = model.heads * model.head_dim;
    switch (kind) {
        case kKcclEngineQkv:
            return {model.hidden, panels_for(queries + 2 * model.kv_heads * model.head_dim), 1};
        case kKcclEngineOut: return {queries, panels_for(model.hidden), 1};
        case kKcclEngineGateUp: return {model.hidden, 2 * panels_for(model.ffn), 2};
        case kKcclEngineDown: return {model.ffn, panels_for(model.hidden), 1};
        // The router has no lanes, so these are all of its panels.
        case kKcclEngineRouter: return {model.hidden, panels_for(model.num_experts), 1};
        case kKcclEngineExpertGateUp: return matrix_of(model, kKcclEngineGateUp);
        case kKcclEngineExpertDown: return matrix_of(model, kKcclEngineDown);
        case kKcclEngineHead:
            return {model.hidden, panels_for(model.vocab_size / model.num_head_groups), 1};
        default: return {0, 0, 1};
    }
}

// Tells whether an op's matrices are those of experts.
inline bool has_experts(const KcclEngineOp& op) {
    return op.kind == kKcclEngineExpertGateUp || op.kind == kKcclEngineExpertDown;
}

// Computes where the panels of an op's weights lie.
class Panels {
  public:
    struct Part {
        uint32_t format, first, end;   // the part is panels [first, end) of a lane
        uint64_t panel_bytes, offset;  // `offset` counts from the lane's first panel
    };

    Panels(const KcclEngineOp& op, const Matrix& matrix) : per_lane_(matrix.panels_per_lane) {
        for (const KcclEnginePart& each : op.parts) {
            if (num_ != 0 && each.first == 0) break;
            if (num_ != 0) end_part(each.first);
            parts_[num_++] = {each.format, each.first, 0,
                              kFormats[each.format].panel_bytes(matrix.num_columns), lane_bytes_};
        }
        end_part(per_lane_);
    }

    // Returns the part that has panel number `in_lane` of a lane.
    const Part& part_of(uint32_t in_lane) const {
        const Part* part = parts_;
        while (in_lane >= part->end) ++part;
        return *part;
    }

    // Returns how many bytes behind the op's first panel a panel begins. `panel` counts the panels
    // of all lanes.
    uint64_t offset_of(uint32_t panel) const {
        const uint32_t in_lane = panel % per_lane_;
        const Part& part = part_of(in_lane);
        return panel / per_lane_ * lane_bytes_ + part.offset +
               (in_lane - part.first) * part.panel_bytes;
    }

    // Returns how many bytes the panels of one lane take.
    uint64_t lane_bytes() const { return lane_bytes_; }

  private:
    void end_part(uint32_t end) {
        Part& last = parts_[num_ - 1];
        last.end = end;
        lane_bytes_ += (end - last.first) * last.panel_bytes;
    }

    Part parts_[std::size(KcclEngineOp{}.parts)];
    uint32_t num_ = 0, per_lane_;
    uint64_t lane_bytes_ = 0;
};

// A column of a run: an id, its position in its text, and the slot of the KV cache that has the
// text's keys and values.
struct Column {
    int32_t id;
    uint32_t position;
    uint32_t slot;
};

// Says that the first `num` positions of a slot of the KV cache are copied into another one.
struct Copy {
    uint32_t to;
    uint32_t from;
    uint32_t num;
};

// What the leading block (block 0 of rank 0) tells all other blocks to run next for the requests of
// a batch (batch.h).
struct BatchPass {
    uint32_t ends;         // not zero: the batch has ended, and there is nothing to run
    uint32_t num_copies;   // made first
    uint32_t num_columns;  // 0: there is nothing to run at the moment
    uint32_t num_logits;
    Copy copies[kKcclEngineMaxMembers];
    Column columns[kColumns];
    uint32_t logits[kKcclEngineLogitColumns];  // the columns whose logits are made
};

struct Chosen {
    int32_t id;
    uint32_t end;
    double logprob;
};

// What the leading block (block 0 of rank 0) decides after a pass, as it tells all other blocks.
struct Decision {
    uint32_t num_tokens;  // how many were chosen from the pass's logits, at least 1
    uint32_t num_next;    // how many ids the next pass runs; 0: the request has ended
    Chosen tokens[kKcclEngineLogitColumns];
    int32_t next[kKcclEngineLogitColumns];  // the last token, then the drafts

    uint32_t num_drafts() const { return num_next > 1 ? num_next - 1 : 0; }
    // Tells whether `id`, the token that the next pass chooses from its column i, equals the draft
    // for that place.
    bool proposes(uint32_t i, int32_t id) const { return i < num_drafts() && next[i + 1] == id; }
};

// Offsets of data in a rank's window, in bytes. They are the same on all ranks.
struct Window {
    uint64_t embedding = 0;  // this rank's rows of the embedding, as they are stored
    uint64_t words;          // uint32 [block], a cache line each: the steps that team.h counts
    uint64_t decision;       // Decision; only rank 0's is used
    uint64_t batch_pass;     // BatchPass; only rank 0's is used
    uint64_t cancelled;      // uint32: number of the request to cancel; only rank 0's is used
    uint64_t verdict;        // uint32: the verdict of Pass::meet(); only rank 0's is used
    uint64_t messages;       // float or BF16 [slot][lane][column][hidden, padded]: num_slots()
    uint64_t finals;         // float [lane][column][hidden, padded]: normalised residuals
    uint64_t logits;         // float [kKcclEngineLogitColumns][vocab_size, padded]
    uint64_t bytes;
};

// Returns for how many modules a rank keeps messages. Those of module m lie in slot m modulo this
// number, so a block that writes them must know that nobody still reads the slot. Let f be
// num_in_flight. Before a block writes the messages of m, it has done the waits of m-1. If m-1
// received messages, these were those of m-1-f. So every block has written those of m-1-f, and
// before that has read what m-2-f received, the messages of m-2-2f. Then 2f+2 slots suffice. If
// only every other module sends, the last module that received was m-2, and every block has read
// the messages of m-4-2f. Then 2f+4 slots suffice. Between passes all blocks wait for each other.
inline uint32_t num_slots(const KcclEngineModel& model) { return 2 * model.num_in_flight + 4; }

// Returns how many lanes the rank with the most lanes has.
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
    at.embedding = add(uint64_t{most_rows(model, world_size)} * model.embedding_row_bytes);
    at.words = add(kKcclEngineMaxBlocks * kLine);
    at.decision = add(sizeof(Decision));
    at.batch_pass = add(sizeof(BatchPass));
    at.cancelled = add(sizeof(uint32_t));
    at.verdict = add(sizeof(uint32_t));
    at.messages = add(num_slots(model) * lanes * kColumns * message);
    at.finals = add(lanes * kColumns * vector);
    at.logits = add(uint64_t{kKcclEngineLogitColumns} * padded(model.vocab_size) * sizeof(float));
    at.bytes = end;
    return at;
}

}  // namespace kccl::engine
