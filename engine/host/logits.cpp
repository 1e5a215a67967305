// Computes the end of a pass: the last norm and the head. Also has the outputs that tests and
// measurements read.
#include <algorithm>
#include <numeric>

#include "pass.h"

namespace kccl::engine {

bool Pass::make_logits(uint32_t first, uint32_t num) {
    uint32_t columns[kKcclEngineLogitColumns];
    std::iota(columns, columns + num, first);
    return make_logits(columns, num);
}

bool Pass::make_logits(const uint32_t* columns, uint32_t num) {
    const KcclEngineOp& norm = ops_[model_.num_ops - 2];
    const KcclEngineOp& head = ops_[model_.num_ops - 1];
    const uint32_t hidden = model_.hidden;
    const bool is_mean = !has_one_residual() && has_one_head();
    const auto* weight = reinterpret_cast<const float*>(norm.norm);
    const auto final_of = [&](uint32_t i, uint32_t c) {
        return finals_.get() + (uint64_t{i} * kKcclEngineLogitColumns + c) * memory_.hidden_stride;
    };
    for (uint32_t i = 0; i < num_residuals(); ++i) {
        for (uint32_t c = 0; c < num; ++c) {
            compute_.rms_norm(residual(i, columns[c]), weight, hidden, model_.norm_eps,
                              final_of(i, c));
            if (!is_mean || block_.index() != 0) continue;
            std::copy_n(final_of(i, c), hidden, own_in_window<float>(at_.finals, 0, i, c));
        }
    }
    if (is_mean) {
        if (!meet()) return false;
        const float* arrays[kKcclEngineMaxLanes];
        for (uint32_t c = 0; c < num; ++c) {
            for (uint32_t lane = 0; lane < model_.num_lanes; ++lane) {
                arrays[lane] = in_window<float>(at_.finals, 0, lane, c);
            }
            compute_.mean(final_of(0, c), arrays, static_cast<int>(model_.num_lanes), hidden);
        }
    }
    const uint32_t rows = model_.vocab_size / model_.num_head_groups;
    const uint64_t stride = memory_.hidden_stride;
    const Columns in = {finals_.get(), has_one_head() ? 0 : kKcclEngineLogitColumns * stride,
                        stride};
    auto* logits = reinterpret_cast<float*>(team_.window[team_.comm.rank] + at_.logits);
    multiply(
        head, in, num,
        [&](uint32_t group, uint32_t work_item, uint32_t, uint32_t columns, const float* products) {
            const uint32_t row = work_item * kRows, left = std::min(rows - row, uint32_t{kRows});
            for (uint32_t c = 0; c < columns; ++c) {
                std::copy_n(products + c * kPanels * kRows, left,
                            logits + uint64_t{c} * padded(model_.vocab_size) + group * rows + row);
            }
        });
    return meet();
}

void Pass::read_logits(uint32_t column, float* out) const {
    const uint32_t rows = model_.vocab_size / model_.num_head_groups;
    const uint32_t per_group = panels_for(rows);
    const auto row_of = [&](uint32_t panel) {
        return panel / per_group * rows + std::min(panel % per_group * kRows, rows);
    };
    for (int rank = 0; rank < team_.comm.world_size; ++rank) {
        const uint32_t first = row_of(model_.first_panel[rank]);
        const uint32_t end = row_of(model_.first_panel[rank + 1]);
        const auto* logits = reinterpret_cast<const float*>(team_.window[rank] + at_.logits) +
                             uint64_t{column} * padded(model_.vocab_size);
        std::copy(logits + first, logits + end, out + first);
    }
}

// ---- For tests and measurements -----------------------------------------------------------------

void Pass::read(const KcclEngineOp& op, uint32_t i, uint32_t column, float* out) const {
    const uint64_t row = uint64_t{i} * kColumns + column;
    switch (op.kind) {
        case kKcclEngineQkv:
            std::copy_n(memory_.qkv.get() + row * memory_.qkv_stride, op.width, out);
            break;
        case kKcclEngineAttend:
            std::copy_n(memory_.attended.get() + row * memory_.attended_stride, op.width, out);
            break;
        case kKcclEngineGateUp:
            std::copy_n(memory_.activated.get() + row * memory_.ffn_stride, op.width, out);
            break;
        case kKcclEngineRouter: {
            const auto* bias = reinterpret_cast<const float*>(op.bias);
            std::copy_n(memory_.routed.get() + column * memory_.routed_stride, op.width, out);
            if (bias != nullptr) compute_.add_scaled(out, bias, 1.0f, op.width);
            break;
        }
        case kKcclEngineExpertGateUp:
            for (uint32_t place = 0; place < model_.num_chosen; ++place) {
                std::copy_n(memory_.activated.get() + row * memory_.ffn_stride +
                                uint64_t{place} * padded(model_.ffn),
                            model_.ffn, out + uint64_t{place} * model_.ffn);
            }
            break;
        case kKcclEngineFinal:
            std::copy_n(finals_.get() + (uint64_t{i} * kKcclEngineLogitColumns + column) *
                                            memory_.hidden_stride,
                        op.width, out);
            break;
        default: std::copy_n(residual(i, column), op.width, out);
    }
}

uint32_t Pass::stream() const {
    uint32_t seen = 0;
    for (uint32_t i = 0; i < model_.num_ops; ++i) {
        const std::span<const uint8_t> own = own_weights(ops_[i]);
        // A token reads the weights of as many experts as it passes, and all experts are equally
        // large. So the first ones stand for those that a router would choose.
        const uint32_t products = has_experts(ops_[i]) ? model_.num_chosen : 1;
        const uint64_t stride = products == 1 ? 0 : weights_of(ops_[i], 1) - ops_[i].weights;
        for (uint32_t product = 0; product < products; ++product) {
            seen ^= compute_.touch(own.data() + product * stride, own.size());
        }
    }
    return seen;
}

}  // namespace kccl::engine
