// Computes a layer's mixture of experts: the router, which chooses experts for each position, and
// the two products of the chosen experts.
//
// The rows of every expert are shared out to all blocks of all ranks, as those of any other matrix,
// so no rank waits for another one's expert. Sums have the same order as with a single position,
// whichever block computes them.
#include <algorithm>

#include "pass.h"

namespace kccl::engine {

// ---- The choice ---------------------------------------------------------------------------------

void Routes::choose(uint32_t column, const float* logits, const float* bias,
                    const Compute& compute) {
    float* own = logits_.get();
    std::copy_n(logits, num_experts_, own);
    if (bias != nullptr) compute.add_scaled(own, bias, 1.0f, num_experts_);
    Passage* chosen = chosen_.get() + uint64_t{column} * num_chosen_;
    uint32_t* experts = experts_.get() + uint64_t{column} * num_chosen_;
    // `experts` is sorted by logits, the largest first. Of equal ones the expert with the lower
    // number comes first.
    uint32_t num = 0;
    for (uint32_t expert = 0; expert < num_experts_; ++expert) {
        if (num == num_chosen_ && !(own[expert] > own[experts[num - 1]])) continue;
        uint32_t at = num < num_chosen_ ? num++ : num - 1;
        for (; at > 0 && own[expert] > own[experts[at - 1]]; --at) experts[at] = experts[at - 1];
        experts[at] = expert;
    }
    // If a logit of the router is NaN, all weights become NaN. So the NaN reaches the model's
    // logits, where the sampler finds it.
    const bool has_nan = compute.peak(own, num_experts_).has_nan;
    const float most = has_nan ? __builtin_nanf("") : own[experts[0]];
    std::sort(experts, experts + num_chosen_);
    compute.powers(own, most, num_experts_);
    float total = 0.0f;
    for (uint32_t place = 0; normalises_ && place < num_chosen_; ++place) {
        total += own[experts[place]];
    }
    for (uint32_t expert = 0; !normalises_ && expert < num_experts_; ++expert) total += own[expert];
    for (uint32_t place = 0; place < num_chosen_; ++place) {
        chosen[place] = {column, place, own[experts[place]] / total};
    }
}

void Routes::group(uint32_t num) {
    uint32_t next[kColumns] = {}, used = 0;
    num_groups_ = 0;
    for (uint32_t expert = 0; expert < num_experts_; ++expert) {
        const uint32_t first = used;
        for (uint32_t c = 0; c < num; ++c) {
            const uint32_t i = c * num_chosen_ + next[c];
            if (next[c] == num_chosen_ || experts_[i] != expert) continue;
            passages_[used++] = chosen_[i];
            ++next[c];
        }
        if (used != first) {
            groups_[num_groups_++] = {expert, used - first, passages_.get() + first};
        }
    }
}

// ---- Ops ----------------------------------------------------------------------------------------

bool Pass::route(const KcclEngineOp& op) {
    if (!norm_columns(reinterpret_cast<const float*>(op.norm))) return false;
    multiply(op, normed_columns(), num_,
             [&](uint32_t, uint32_t work_item, uint32_t column, uint32_t columns,
                 const float* products) {
                 for (uint32_t c = 0; c < columns; ++c) {
                     float* to = memory_.routed.get() + (column + c) * memory_.routed_stride;
                     std::copy_n(products + c * kPanels * kRows, kRows, to + work_item * kRows);
                 }
             });
    if (!block_.await_rank(publish())) return false;
    for (uint32_t c = 0; c < num_; ++c) {
        routes_.choose(c, memory_.routed.get() + c * memory_.routed_stride,
                       reinterpret_cast<const float*>(op.bias), compute_);
    }
    routes_.group(num_);
    return true;
}

uint64_t Pass::weights_of(const KcclEngineOp& op, uint32_t expert) const {
    const Panels panels(op, matrix_of(op));
    return op.weights + uint64_t{expert} * num_lanes_ * panels.lane_bytes();
}

// Copies the vectors of some passages (positions that pass one expert) side by side, for lanes
// [first, end). from(passage, lane) returns a passage's vector in a lane, n floats.
template <class From>
Columns Pass::gathered(const Passages& passages, uint32_t n, uint32_t first, uint32_t end,
                       From from) {
    const uint64_t stride = padded(n), lane_stride = kColumns * stride;
    for (uint32_t lane = first; lane < end; ++lane) {
        for (uint32_t i = 0; i < passages.num; ++i) {
            float* to = gathered_.get() + lane * lane_stride + i * stride;
            std::copy_n(from(passages.first[i], lane), n, to);
            // The padding is cleared, because vectors of another length may have lain here before.
            // The padding's weights are 0, which would not hide a NaN.
            std::fill(to + n, to + stride, 0.0f);
        }
    }
    return {gathered_.get(), lane_stride, stride};
}

bool Pass::expert_gate_up(const KcclEngineOp& op) {
    // The residuals are not normalised here, because the router's op has done so.
    const Matrix matrix = matrix_of(op);
    const uint32_t of_expert = num_lanes_ * (matrix.panels_per_lane / matrix.panels_at_once);
    const uint64_t place_stride = padded(model_.ffn);
    // The work items (panels of rows that one block computes) of all chosen experts are shared out
    // together, since one expert may have fewer of them than there are blocks.
    const Share all = share_of(of_expert * routes_.num_groups(), block_.index(), team_.num_blocks);
    for (uint32_t group = 0; group < routes_.num_groups(); ++group) {
        const uint32_t begin = group * of_expert;
        const Share own = {std::clamp(uint32_t(all.first), begin, begin + of_expert) - begin,
                           std::clamp(uint32_t(all.end), begin, begin + of_expert) - begin};
        if (own.first == own.end) continue;
        const Passages& passages = routes_[group];
        Columns in = normed_columns();
        if (!is_alone()) {
            in = gathered(passages, model_.hidden, 0, 1, [&](const Passage& passage, uint32_t) {
                return normed() + passage.column * memory_.hidden_stride;
            });
            in.lane_stride = 0;
        }
        multiply(op, weights_of(op, passages.expert), own, in, passages.num,
                 [&](uint32_t lane, uint32_t work_item, uint32_t column, uint32_t columns,
                     const float* products) {
                     for (uint32_t c = 0; c < columns; ++c) {
                         const Passage& passage = passages.first[column + c];
                         activate(
                             op, uint64_t{passages.expert} * num_lanes_ + lane, work_item,
                             products + c * kPanels * kRows,
                             memory_.activated.get() +
                                 (uint64_t{lane} * kColumns + passage.column) * memory_.ffn_stride +
                                 passage.place * place_stride);
                     }
                 });
    }
    return block_.await_rank(publish());
}

void Pass::expert_down(const KcclEngineOp& op) {
    const uint64_t place_stride = padded(model_.ffn);
    const Share own = share(op);
    const uint32_t per_lane = matrix_of(op).panels_per_lane;
    const uint32_t first_lane = own.first / per_lane,
                   end_lane = (own.end + per_lane - 1) / per_lane;
    const auto from = [&](const Passage& passage, uint32_t lane) {
        return memory_.activated.get() +
               (uint64_t{lane} * kColumns + passage.column) * memory_.ffn_stride +
               passage.place * place_stride;
    };
    const auto own_rows = [&](uint32_t lane, uint32_t column, uint32_t work_item) {
        return memory_.own.get() + (uint64_t{lane} * kColumns + column) * memory_.hidden_stride +
               work_item * kRows;
    };
    // The experts come in ascending order, so a position's outputs are added up in that order.
    for (uint32_t group = 0; group < routes_.num_groups(); ++group) {
        const Passages& passages = routes_[group];
        Columns in = {from(passages.first[0], 0), kColumns * memory_.ffn_stride, 0};
        if (!is_alone()) in = gathered(passages, model_.ffn, first_lane, end_lane, from);
        multiply(op, weights_of(op, passages.expert), own, in, passages.num,
                 [&](uint32_t lane, uint32_t work_item, uint32_t column, uint32_t columns,
                     const float* products) {
                     for (uint32_t c = 0; c < columns; ++c) {
                         const Passage& passage = passages.first[column + c];
                         float* to = own_rows(lane, passage.column, work_item);
                         if (passage.place == 0) std::fill_n(to, kRows, 0.0f);
                         compute_.add_scaled(to, products + c * kPanels * kRows, passage.weight,
                                             kRows);
                     }
                 });
    }
    const uint64_t slot = op.module % num_slots(model_);
    for (uint64_t i = own.first; i < own.end; ++i) {
        const auto lane = static_cast<uint32_t>(i / per_lane),
                   item = static_cast<uint32_t>(i % per_lane);
        for (uint32_t c = 0; c < num_; ++c) {
            write_message(own_rows(lane, c, item),
                          own_in_window<float>(at_.messages, slot, lane, c) + item * kRows);
        }
    }
    if (is_alone()) prefetch(op);
}

// Adds up the biases of the experts that a column (position of the run) passes, each times the
// expert's weight. Returns float [hidden], valid until gathered_ is used again.
const float* Pass::expert_bias(const KcclEngineOp& op, uint32_t column) {
    float* sum = gathered_.get();
    std::fill_n(sum, model_.hidden, 0.0f);
    routes_.each_of(column, [&](uint32_t expert, float weight) {
        compute_.add_scaled(
            sum, reinterpret_cast<const float*>(op.bias) + uint64_t{expert} * model_.hidden, weight,
            model_.hidden);
    });
    return sum;
}

}  // namespace kccl::engine
