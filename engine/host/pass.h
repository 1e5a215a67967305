// Declares a block's part of a forward pass: one run of the program's ops over a few positions. A
// column is one of these positions.
#pragma once

#include <algorithm>
#include <span>

#include "memory.h"
#include "routes.h"
#include "team.h"

namespace kccl::engine {

// The input of a product: for each column, a vector of activations.
struct Columns {
    const float* first;
    uint64_t lane_stride;  // 0: all lanes take the same columns
    uint64_t stride;       // how many floats lie between two columns
};

// A forward pass as one block runs it. All blocks of all ranks make the same calls.
class Pass {
  public:
    Pass(const KcclEngineModel& model, const KcclEngineTeam& team, const Window& at,
         const RankMemory& memory, uint32_t block);

    // Runs ops 0 to `last_op`, except "final" and "head", on `num` columns, at most kColumns.
    // Columns of one text must be neighbours. Returns false if a wait failed. Then no other
    // function may be called.
    bool run(const Column* columns, uint32_t num, uint32_t last_op);
    // Does the same for ids that follow each other, from `position` on, in the slot of the request
    // that runs alone.
    bool run(const int32_t* ids, uint32_t num, uint32_t position, uint32_t last_op);

    // Runs "final" and "head" for columns of the last run. num is at most kKcclEngineLogitColumns.
    // On return, each rank's window has that rank's rows of the logits, for all ranks to read.
    // Returns false if a wait failed.
    bool make_logits(const uint32_t* columns, uint32_t num);
    // Does the same for columns [first, first + num).
    bool make_logits(uint32_t first, uint32_t num);

    // Copies this block's share of the first positions of a slot of the KV cache into another slot.
    // Other blocks may read the copy when they have waited for this block's next step.
    void copy(const Copy& copy) const;

    // Copies the logits of a column of make_logits() from all ranks' windows to `out`,
    // [vocab_size].
    void read_logits(uint32_t column, float* out) const;

    // Copies the output of `op` in a column of the last run to `out`, for tests. That run must have
    // ended with the op. i: which of this rank's lanes, or which residual, it is the output of.
    // Called only by block 0 of a rank.
    void read(const KcclEngineOp& op, uint32_t i, uint32_t column, float* out) const;

    // Publishes the writes of this block (as the next step), and waits for all blocks of all ranks.
    // Returns false if the wait failed.
    bool meet();
    // Does what meet() does, and makes all blocks agree on whether the request is cancelled. Before
    // the call, the leading block (block 0 of rank 0) sets *is_cancelled. After the call, all
    // blocks have its value.
    bool meet(bool* is_cancelled);
    // Publishes the writes of this block: others may read them when they have waited for this step.
    // Returns the step's number.
    uint32_t publish();
    Block& block() { return block_; }

    // Reads this block's weights, and does nothing else. Returns a number made of them, so that the
    // reads are not optimised away.
    uint32_t stream() const;

    uint32_t num_lanes() const { return num_lanes_; }

    // Tells whether there was enough memory. If not, no other function may be called.
    bool is_complete() const {
        return steps_of_modules_ && first_weights_ && residuals_ && normed_ && finals_ && scores_ &&
               digits_ && routes_.is_complete() && gathered_;
    }

  private:
    Matrix matrix_of(const KcclEngineOp& op) const { return engine::matrix_of(model_, op.kind); }
    Share share(const KcclEngineOp& op) const;
    uint64_t most_groups() const;

    void embed();
    bool qkv(const KcclEngineOp& op);
    void prepare_heads(const KcclEngineOp& op);
    bool attend(const KcclEngineOp& op);
    template <class Element>
    bool exchange(const KcclEngineOp& op);
    template <class Element>
    void add_outputs(const KcclEngineOp& op, const Element* const* messages, uint32_t i,
                     uint32_t column);
    // Messages (outputs for other lanes) have elements of BF16 or FP32, so write_message() and
    // add_sum() have a version for each.
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
    template <class Element>
    bool add_messages(const KcclEngineOp& op);
    bool swiglu(const KcclEngineOp& op);
    void activate(const KcclEngineOp& op, uint64_t lane, uint32_t work_item, const float* products,
                  float* activated) const;

    // The ops of a mixture of experts, which are in experts.cpp.
    bool route(const KcclEngineOp& op);
    bool expert_gate_up(const KcclEngineOp& op);
    void expert_down(const KcclEngineOp& op);
    uint64_t weights_of(const KcclEngineOp& op, uint32_t expert) const;
    template <class From>
    Columns gathered(const Passages& passages, uint32_t n, uint32_t first, uint32_t end, From from);
    const float* expert_bias(const KcclEngineOp& op, uint32_t column);

    // Returns which of this run's residuals this block updates. Each column of each residual counts
    // as one.
    Share own_columns() const {
        const uint32_t total = num_residuals() * num_;
        return is_alone() ? Share{0, total} : share_of(total, block_.index(), team_.num_blocks);
    }
    bool norm_columns(const float* norm);
    Columns normed_columns() const;
    // Multiplies this block's work items (panels of rows) of an op. The function at the end of this
    // file says how it calls `use`.
    template <class Use>
    void multiply(const KcclEngineOp& op, Columns in, uint32_t num, Use use) {
        multiply(op, op.weights, share(op), in, num, use);
        if (num == 1) prefetch(op);
    }
    template <class Use>
    void multiply(const KcclEngineOp& op, uint64_t weights, Share work_items, Columns in,
                  uint32_t num, Use use);

    void prefetch(const KcclEngineOp& op) const;
    // Returns the number of the rank's first panel of an op. In the head, lanes stand for groups of
    // rows, and this panel may lie within a group.
    uint32_t first_panel(const KcclEngineOp& op) const {
        return op.kind == kKcclEngineHead ? model_.first_panel[team_.comm.rank] : 0;
    }
    // Returns the weights of an op that this block multiplies.
    std::span<const uint8_t> own_weights(const KcclEngineOp& op) const;

    // Returns the address of a column's vector of lane `lane` in a region of the window of the rank
    // that has the lane. `lane` counts all lanes of the model.
    template <class Element>
    const Element* in_window(uint64_t region, uint64_t slot, uint32_t lane, uint32_t column) const {
        int rank = 0;
        while (lane >= model_.first_lane[rank + 1]) ++rank;
        const uint64_t most = most_lanes(model_, team_.comm.world_size);
        const uint64_t vector = (slot * most + lane - model_.first_lane[rank]) * kColumns + column;
        return reinterpret_cast<const Element*>(team_.window[rank] + region) +
               vector * memory_.hidden_stride;
    }
    // Returns the address of a column's vector of lane `lane` in this rank's own window. `lane`
    // counts this rank's lanes.
    template <class Element>
    Element* own_in_window(uint64_t region, uint64_t slot, uint32_t lane, uint32_t column) const {
        return const_cast<Element*>(in_window<Element>(region, slot, first_lane_ + lane, column));
    }
    // Tells whether the run has a single position. To share the residuals of one position would
    // cost a wait, so every block then computes all of them. Those of several positions are shared
    // out, and lie in the rank's memory.
    bool is_alone() const { return num_ == 1; }
    // residuals() and normed() return float [residual][column of this run][hidden, padded].
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
    uint32_t num_ = 0;  // how many columns this run has
    Column columns_[kColumns] = {};
    Array<uint32_t> steps_of_modules_;
    Array<const uint8_t*> first_weights_;  // [op]: where this block's next product begins
    Floats residuals_;                     // [residual][hidden, padded]
    Floats normed_;                        // [residual][hidden, padded]
    Floats finals_;                        // [residual][kKcclEngineLogitColumns][hidden, padded]
    Floats scores_;  // attention's scores of a work item: [query, at most kQueries][position]
    Array<DigitGroup> digits_;  // [column][group]: a lane's input of the product that runs
    Routes routes_;
    Floats gathered_;  // [lane][column][...]: the input columns of one expert, side by side
};

// Multiplies work items (panels of rows) by `num` columns of their lane's input. weights_of_op: the
// address of the weights of the op, or of one expert. Calls use(lane, work item of the lane, first
// column, number of columns, products) for each work item and each kGroup columns. products: float
// [column][kPanels * kRows].
template <class Use>
void Pass::multiply(const KcclEngineOp& op, uint64_t weights_of_op, Share work_items, Columns in,
                    uint32_t num, Use use) {
    const Matrix matrix = matrix_of(op);
    const uint32_t num_pairs = pairs_for(matrix.num_columns), at_once = matrix.panels_at_once;
    const Panels of_op(op, matrix);
    const uint32_t per_lane = matrix.panels_per_lane / at_once, first = first_panel(op);
    const uint64_t weights = weights_of_op - of_op.offset_of(first);
    const uint64_t num_groups = matrix.num_columns / kDigitGroup;
    const float* prepared = nullptr;
    Prepare prepared_by = nullptr;
    alignas(64) float products[kGroup * kPanels * kRows];
    for (uint32_t work_item = work_items.first; work_item < work_items.end;) {
        const uint32_t lane = (first + work_item) / per_lane,
                       in_lane = (first + work_item) % per_lane;
        const Panels::Part& part = of_op.part_of(in_lane * at_once);
        const uint32_t some =
            std::min({work_items.end - work_item, part.end / at_once - in_lane, kPanels / at_once});
        const Prepare prepare = compute_.prepare[part.format];
        const uint32_t input = op.kind == kKcclEngineHead ? lane - first_lane_ : lane;
        const float* of_lane = in.first + input * in.lane_stride;
        const float* x = of_lane;
        uint64_t stride = in.stride;
        if (prepare != nullptr) {
            const bool is_new = of_lane != prepared || prepare != prepared_by;
            for (uint32_t c = 0; is_new && c < num; ++c) {
                prepare(of_lane + c * in.stride, matrix.num_columns,
                        digits_.get() + c * num_groups);
            }
            prepared = of_lane;
            prepared_by = prepare;
            x = reinterpret_cast<const float*>(digits_.get());
            stride = num_groups * (sizeof(DigitGroup) / sizeof(float));
        }
        const auto* panels = reinterpret_cast<const uint8_t*>(
            weights + of_op.offset_of((first + work_item) * at_once));
        for (uint32_t column = 0; column < num; column += kGroup) {
            const int columns = static_cast<int>(std::min(num - column, uint32_t{kGroup}));
            compute_.multiply[part.format](panels, static_cast<int>(some * at_once), num_pairs,
                                           x + column * stride, stride, columns, products);
            for (uint32_t i = 0; i < some; ++i) {
                use(lane, in_lane + i, column, static_cast<uint32_t>(columns),
                    products + i * at_once * kRows);
            }
        }
        work_item += some;
    }
}

}  // namespace kccl::engine
