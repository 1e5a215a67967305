// A block's part in one pass of the program over a few positions.
#pragma once

#include <algorithm>

#include "memory.h"
#include "team.h"

namespace kccl::engine {

// What a product takes: columns of activations.
struct Columns {
    const float* first;
    uint64_t lane_stride;  // 0: all lanes take the same
    uint64_t stride;       // between columns
};

// One block. All blocks of all ranks make the same calls.
class Pass {
  public:
    Pass(const KcclEngineModel& model, const KcclEngineTeam& team, const Window& at,
         const RankMemory& memory, uint32_t block);

    // Runs ops 0 to `last_op`, but not "final" and "head". num: at most kColumns ids for the
    // positions from `position` on. False: a wait failed, and nothing may follow.
    bool run(const int32_t* ids, uint32_t num, uint32_t position, uint32_t last_op);

    // "final" and "head" for columns [first, first + num) of the last run, num at most
    // kKcclEngineLogitColumns. On return every rank's window has its rows.
    bool make_logits(uint32_t first, uint32_t num);

    // Collects the logits of a column of make_logits(), [vocab_size].
    void read_logits(uint32_t column, float* out) const;

    // The output of one op for column `column` of the last run, which ended with it: the i-th of
    // this rank's lanes, or the i-th residual. Only block 0 of a rank.
    void read(const KcclEngineOp& op, uint32_t i, uint32_t column, float* out) const;

    // Publishes what this block wrote, and waits for all blocks of all ranks.
    bool meet();
    // As meet(). *is_cancelled: in, on the leading block, whether the request is to end; out, on
    // all blocks, what the leading block said.
    bool meet(bool* is_cancelled);
    // Publishes; returns the step.
    uint32_t publish();
    Block& block() { return block_; }

    // Reads this block's weights and does nothing else.
    uint32_t stream() const;

    uint32_t num_lanes() const { return num_lanes_; }

    // Whether there was memory for it. Nothing else may be called if not.
    bool is_complete() const {
        return steps_of_modules_ && first_weights_ && residuals_ && normed_ && finals_ && scores_;
    }

  private:
    Matrix matrix_of(const KcclEngineOp& op) const { return engine::matrix_of(model_, op.kind); }
    Share share(const KcclEngineOp& op) const;

    void embed(const int32_t* ids);
    bool qkv(const KcclEngineOp& op);
    void prepare_heads(const KcclEngineOp& op);
    bool attend(const KcclEngineOp& op);
    template <class Element>
    bool exchange(const KcclEngineOp& op);
    template <class Element>
    void add_outputs(const KcclEngineOp& op, const Element* const* messages, uint32_t i,
                     uint32_t column);
    // Messages are BF16 or FP32.
    void write_message(const float* from, uint16_t* to) const {
        compute_.round_to_bf16(from, kRows, to);
    }
    void write_message(const float* from, float* to) const { std::copy_n(from, kRows, to); }
    void add_sum(float* x, const uint16_t* const* messages, int num) const {
        compute_.add_sum_of_bf16(x, messages, num, model_.hidden);
    }
    void add_sum(float* x, const float* const* messages, int num) const {
        compute_.add_sum(x, messages, num, model_.hidden);
    }
    bool gate_up(const KcclEngineOp& op);
    void add_biases(const KcclEngineOp& op, uint32_t lane, uint32_t unit, float* gate) const;

    // What this block updates of this run's residuals and columns, which are counted together.
    Share own_columns() const {
        const uint32_t total = num_residuals() * num_;
        return is_alone() ? Share{0, total} : share_of(total, block_.index(), team_.num_blocks);
    }
    bool norm_columns(const float* norm);
    Columns normed_columns() const;
    template <class Use>
    void multiply(const KcclEngineOp& op, Columns in, uint32_t num, Use use);

    void prefetch(const KcclEngineOp& op) const;

    // The address of lane `lane` of the model, in the window of the rank that has it.
    template <class Element>
    const Element* in_window(uint64_t region, uint64_t slot, uint32_t lane, uint32_t column) const {
        int rank = 0;
        while (lane >= model_.first_lane[rank + 1]) ++rank;
        const uint64_t most = most_lanes(model_, team_.comm.world_size);
        const uint64_t vector = (slot * most + lane - model_.first_lane[rank]) * kColumns + column;
        return reinterpret_cast<const Element*>(team_.window[rank] + region) +
               vector * memory_.hidden_stride;
    }
    // The address of lane `lane` of this rank, in its own window.
    template <class Element>
    Element* own_in_window(uint64_t region, uint64_t slot, uint32_t lane, uint32_t column) const {
        return const_cast<Element*>(in_window<Element>(region, slot, first_lane_ + lane, column));
    }
    // A single position is worth no wait: every block computes all residuals by itself. Those of
    // several positions are shared out, and lie in the rank's memory.
    bool is_alone() const { return num_ == 1; }
    // [residual][column of this run]
    float* residuals() const { return is_alone() ? residuals_.get() : memory_.residuals.get(); }
    float* normed() const { return is_alone() ? normed_.get() : memory_.normed.get(); }
    float* residual(uint32_t i, uint32_t column) const {
        return residuals() + (uint64_t{i} * num_ + column) * memory_.hidden_stride;
    }
    bool has_one_head() const { return model_.num_head_groups == 1; }
    bool has_one_residual() const { return model_.num_residuals == 1; }
    uint32_t num_residuals() const { return memory_.num_residuals; }

    const KcclEngineModel& model_;
    const KcclEngineTeam& team_;
    const Window& at_;
    const RankMemory& memory_;
    const Compute& compute_ = compute();
    const KcclEngineOp* const ops_;
    Block block_;
    const uint32_t first_lane_, num_lanes_;
    uint32_t step_ = 0;
    uint32_t num_ = 0;       // columns of this run
    uint32_t position_ = 0;  // of the first
    Array<uint32_t> steps_of_modules_;
    Array<const uint8_t*> first_weights_;  // [op]: of this block's next product after the op
    Floats residuals_;                     // [residual][hidden, padded]
    Floats normed_;                        // [residual][hidden, padded]
    Floats finals_;  // [residual][column of kKcclEngineLogitColumns][hidden, padded]
    Floats scores_;  // [query of kQueries][position]
};

// Multiplies this block's units with `num` columns of their lane.
// use(lane, unit of the lane, first column, number of columns, float [column][kPanels * kRows]):
// takes the products of one unit.
template <class Use>
void Pass::multiply(const KcclEngineOp& op, Columns in, uint32_t num, Use use) {
    const Matrix matrix = matrix_of(op);
    const Share units = share(op);
    const uint32_t num_pairs = (matrix.num_columns + 1) / 2;
    const uint64_t elements = panel_elements(matrix.num_columns);
    const uint32_t per_lane = matrix.panels_per_lane / matrix.panels_at_once;
    const auto* weights = reinterpret_cast<const uint16_t*>(op.weights);
    // A head's lanes are groups of rows, and the rank's first panel may lie within one.
    const uint32_t first = op.kind == kKcclEngineHead ? model_.first_panel[team_.comm.rank] : 0;
    alignas(64) float products[kGroup * kPanels * kRows];
    for (uint32_t unit = units.first; unit < units.end;) {
        const uint32_t lane = (first + unit) / per_lane, in_lane = (first + unit) % per_lane;
        const uint32_t some =
            std::min({units.end - unit, per_lane - in_lane, kPanels / matrix.panels_at_once});
        const uint32_t input = op.kind == kKcclEngineHead ? lane - first_lane_ : lane;
        const float* of_lane = in.first + input * in.lane_stride;
        const uint16_t* panels = weights + uint64_t{unit} * matrix.panels_at_once * elements;
        for (uint32_t column = 0; column < num; column += kGroup) {
            const int columns = static_cast<int>(std::min(num - column, uint32_t{kGroup}));
            compute_.multiply(panels, static_cast<int>(some * matrix.panels_at_once), num_pairs,
                              of_lane + column * in.stride, in.stride, columns, products);
            for (uint32_t i = 0; i < some; ++i) {
                use(lane, in_lane + i, column, static_cast<uint32_t>(columns),
                    products + i * matrix.panels_at_once * kRows);
            }
        }
        unit += some;
    }
    if (num == 1) prefetch(op);
}

}  // namespace kccl::engine
