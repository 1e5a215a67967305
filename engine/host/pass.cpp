#include "pass.h"

#include <algorithm>
#include <type_traits>

namespace kccl::engine {
namespace {

// How many bytes of the next product's weights a block prefetches.
constexpr uint64_t kFirstBytes = 8192;

}  // namespace

Pass::Pass(const KcclEngineModel& model, const KcclEngineTeam& team, const Window& at,
           const RankMemory& memory, uint32_t block)
    : model_(model),
      team_(team),
      at_(at),
      memory_(memory),
      ops_(reinterpret_cast<const KcclEngineOp*>(model.ops)),
      block_(team, block, at.words),
      first_lane_(model.first_lane[team.comm.rank]),
      num_lanes_(model.first_lane[team.comm.rank + 1] - first_lane_),
      steps_of_modules_(zeros<uint32_t>(2, model.num_layers)),
      first_weights_(zeros<const uint8_t*>(model.num_ops)),
      residuals_(zeros(memory.num_residuals, memory.hidden_stride)),
      normed_(zeros(memory.num_residuals, memory.hidden_stride)),
      finals_(zeros(model.num_residuals, kKcclEngineLogitColumns, memory.hidden_stride)),
      scores_(zeros(kQueries, padded(model.context))),
      digits_(zeros<DigitGroup>(kColumns, most_groups())),
      routes_(model),
      gathered_(model.num_experts == 0
                    ? zeros(1)
                    : zeros(std::max(num_lanes_, 1u), kColumns,
                            std::max(memory.hidden_stride, uint64_t{padded(model.ffn)}))) {
    if (!first_weights_) return;
    for (uint32_t i = 0; i < model.num_ops; ++i) {
        uint32_t next = i;
        do next = (next + 1) % model.num_ops;
        while (ops_[next].weights == 0 && next != i);
        // Weights of experts are not prefetched: which experts come is known only when the router's
        // op has run.
        if (!has_experts(ops_[next])) first_weights_[i] = own_weights(ops_[next]).data();
    }
}

// Returns how many groups of digits (digits.h) the longest vector has that a product of an integer
// format multiplies.
uint64_t Pass::most_groups() const {
    uint64_t most = 0;
    for (uint32_t i = 0; i < model_.num_ops; ++i) {
        if (ops_[i].weights == 0) continue;
        for (const KcclEnginePart& part : ops_[i].parts) {
            if (compute_.prepare[part.format] == nullptr) continue;
            most = std::max(most, uint64_t{matrix_of(ops_[i]).num_columns} / kDigitGroup);
        }
    }
    return most;
}

// ---- Steps --------------------------------------------------------------------------------------

uint32_t Pass::publish() {
    block_.publish(++step_);
    return step_;
}

bool Pass::meet() { return block_.await_all(publish()); }

bool Pass::meet(bool* is_cancelled) {
    // The verdict, which the leading block writes, carries its step's number. A block that reads
    // late may find the next step's verdict. The leading block makes a next one only if the request
    // goes on, so that block then goes on, too.
    auto* verdict = reinterpret_cast<uint32_t*>(team_.window[0] + at_.verdict);
    const uint32_t ends_here = (step_ + 1) << 1 | 1;
    if (block_.leads()) {
        mem::store<mem::Order::kRelaxed, mem::Scope::kSystem>(
            verdict, *is_cancelled ? ends_here : ends_here - 1);
    }
    if (!meet()) return false;
    *is_cancelled = mem::load<mem::Order::kRelaxed, mem::Scope::kSystem>(verdict) == ends_here;
    return true;
}

// ---- Products -----------------------------------------------------------------------------------

// Returns which work items (panels of rows) of an op, or of one expert, this block computes. They
// are counted over all lanes of the rank.
Share Pass::share(const KcclEngineOp& op) const {
    const Matrix matrix = matrix_of(op);
    const int rank = team_.comm.rank;
    uint32_t total = num_lanes_ * (matrix.panels_per_lane / matrix.panels_at_once);
    if (op.kind == kKcclEngineHead) {
        total = model_.first_panel[rank + 1] - model_.first_panel[rank];
    }
    if (op.kind == kKcclEngineRouter) total = matrix.panels_per_lane;
    return share_of(total, block_.index(), team_.num_blocks);
}

std::span<const uint8_t> Pass::own_weights(const KcclEngineOp& op) const {
    if (op.weights == 0) return {};
    const Matrix matrix = matrix_of(op);
    const Panels panels(op, matrix);
    const uint32_t first = first_panel(op);
    const Share own = share(op);
    const auto offset_of = [&](uint64_t work_item) {
        return panels.offset_of(first + static_cast<uint32_t>(work_item) * matrix.panels_at_once) -
               panels.offset_of(first);
    };
    return {reinterpret_cast<const uint8_t*>(op.weights) + offset_of(own.first),
            offset_of(own.end) - offset_of(own.first)};
}

// Prefetches this block's first weights of the product that follows `op`, while the blocks wait for
// each other.
void Pass::prefetch(const KcclEngineOp& op) const {
    const auto* first = first_weights_[static_cast<size_t>(&op - ops_)];
    if (first == nullptr) return;
    for (uint64_t at = 0; at < kFirstBytes; at += 64) __builtin_prefetch(first + at);
}

void Pass::copy(const Copy& copy) const {
    const uint32_t heads = model_.num_layers * static_cast<uint32_t>(memory_.num_kv);
    memory_.copy(copy, model_.head_dim, share_of(heads, block_.index(), team_.num_blocks));
}

// Normalises the residuals into normed(). Returns false if a wait failed.
bool Pass::norm_columns(const float* norm) {
    const Share own = own_columns();
    for (uint64_t i = own.first; i < own.end; ++i) {
        const uint64_t at = i * memory_.hidden_stride;
        compute_.rms_norm(residuals() + at, norm, model_.hidden, model_.norm_eps, normed() + at);
    }
    return is_alone() || block_.await_rank(publish());
}

Columns Pass::normed_columns() const {
    const uint64_t stride = memory_.hidden_stride;
    return {normed(), has_one_residual() ? 0 : num_ * stride, stride};
}

// ---- Ops ----------------------------------------------------------------------------------------

bool Pass::run(const int32_t* ids, uint32_t num, uint32_t position, uint32_t last_op) {
    Column columns[kColumns];
    for (uint32_t c = 0; c < num; ++c) columns[c] = {ids[c], position + c, memory_.slot};
    return run(columns, num, last_op);
}

bool Pass::run(const Column* columns, uint32_t num, uint32_t last_op) {
    num_ = num;
    std::copy_n(columns, num, columns_);
    embed();
    for (uint32_t i = 1; i <= last_op; ++i) {
        const KcclEngineOp& op = ops_[i];
        bool is_fine = true;
        switch (op.kind) {
            case kKcclEngineQkv: is_fine = qkv(op); break;
            case kKcclEngineAttend: is_fine = attend(op); break;
            case kKcclEngineGateUp: is_fine = swiglu(op); break;
            case kKcclEngineRouter: is_fine = route(op); break;
            case kKcclEngineExpertGateUp: is_fine = expert_gate_up(op); break;
            case kKcclEngineExpertDown:
                expert_down(op);
                is_fine = add_messages<float>(op);
                break;
            case kKcclEngineOut:
            case kKcclEngineDown:
                is_fine =
                    model_.rounds_messages != 0 ? exchange<uint16_t>(op) : exchange<float>(op);
                break;
            default: break;
        }
        if (!is_fine) return false;
    }
    // With several columns, other blocks read residuals that this block has written.
    return is_alone() || block_.await_rank(publish());
}

void Pass::embed() {
    const Share own = own_columns();
    for (uint32_t i = own.first; i < own.end; ++i) {
        const auto id = static_cast<uint32_t>(columns_[i % num_].id);
        int rank = 0;
        while (id >= model_.first_row[rank + 1]) ++rank;
        const auto* row = reinterpret_cast<const uint8_t*>(team_.window[rank] + at_.embedding) +
                          uint64_t{id - model_.first_row[rank]} * model_.embedding_row_bytes;
        kFormats[ops_[0].parts[0].format].widen(row, model_.hidden,
                                                residuals() + i * memory_.hidden_stride);
    }
}

bool Pass::qkv(const KcclEngineOp& op) {
    if (!norm_columns(reinterpret_cast<const float*>(op.norm))) return false;
    multiply(op, normed_columns(), num_,
             [&](uint32_t lane, uint32_t work_item, uint32_t column, uint32_t columns,
                 const float* products) {
                 for (uint32_t c = 0; c < columns; ++c) {
                     float* to = memory_.qkv.get() +
                                 (uint64_t{lane} * kColumns + column + c) * memory_.qkv_stride;
                     std::copy_n(products + c * kPanels * kRows, kRows, to + work_item * kRows);
                 }
             });
    if (!block_.await_rank(publish())) return false;
    prepare_heads(op);
    return block_.await_rank(publish());
}

// Finishes this block's share of the heads: adds biases, normalises and rotates queries and keys,
// and appends keys and values to the cache.
void Pass::prepare_heads(const KcclEngineOp& op) {
    const uint32_t d = model_.head_dim, per_lane = model_.heads + 2 * model_.kv_heads;
    const auto* cosines = reinterpret_cast<const float*>(model_.cosines);
    const auto* sines = reinterpret_cast<const float*>(model_.sines);
    const Share heads = share_of(num_lanes_ * per_lane, block_.index(), team_.num_blocks);
    for (uint32_t i = heads.first; i < heads.end; ++i) {
        const uint32_t lane = i / per_lane, head = i % per_lane;
        const bool is_query = head < model_.heads, is_value = head >= per_lane - model_.kv_heads;
        const uint64_t norm = is_query ? op.q_norm : op.k_norm;
        const uint32_t of_keys = is_query ? 0 : (head - model_.heads) % model_.kv_heads;
        const uint64_t kv = uint64_t{lane} * model_.kv_heads + of_keys;
        for (uint32_t c = 0; c < num_; ++c) {
            float* x = memory_.qkv.get() + (uint64_t{lane} * kColumns + c) * memory_.qkv_stride +
                       uint64_t{head} * d;
            const auto [id, position, slot] = columns_[c];
            if (op.bias != 0) {
                compute_.add_scaled(x, reinterpret_cast<const float*>(op.bias) + uint64_t{i} * d,
                                    1.0f, d);
            }
            if (is_value) {
                std::copy_n(x, d,
                            memory_.values_of(slot, op.layer, kv) + uint64_t{position} * padded(d));
                continue;
            }
            if (norm != 0) {
                compute_.rms_norm(x, reinterpret_cast<const float*>(norm), d, model_.norm_eps, x);
            }
            const uint64_t angles = uint64_t{position} * (d / 2);
            compute_.rotate(x, cosines + angles, sines + angles, d);
            if (is_query) continue;
            float* keys = memory_.keys_of(slot, op.layer, kv) +
                          uint64_t{position / kKeyBlock} * d * kKeyBlock + position % kKeyBlock;
            for (uint32_t k = 0; k < d; ++k) keys[uint64_t{k} * kKeyBlock] = x[k];
        }
    }
}

bool Pass::attend(const KcclEngineOp& op) {
    const uint32_t d = model_.head_dim, group = model_.heads / model_.kv_heads;
    const auto* sinks = reinterpret_cast<const float*>(op.sinks);
    // Queries that share a KV head lie next to each other: [lane][KV head][column][query head].
    const uint32_t together = num_ * group;
    const Share all =
        share_of(num_lanes_ * model_.kv_heads * together, block_.index(), team_.num_blocks);
    for (uint32_t i = all.first; i < all.end;) {
        const uint32_t kv = i / together, lane = kv / model_.kv_heads;
        const uint32_t slot = columns_[i % together / group].slot;
        const uint32_t most = std::min({all.end - i, together - i % together, uint32_t{kQueries}});
        Query queries[kQueries];
        uint32_t some = 0;
        // Columns of different texts see different keys.
        for (; some < most && columns_[i % together / group].slot == slot; ++some, ++i) {
            const uint32_t c = i % together / group;
            const uint32_t head = kv % model_.kv_heads * group + i % group;
            const uint64_t row = uint64_t{lane} * kColumns + c, at = uint64_t{head} * d;
            const uint32_t end = columns_[c].position + 1;
            queries[some] = {
                memory_.qkv.get() + row * memory_.qkv_stride + at,
                memory_.attended.get() + row * memory_.attended_stride + at,
                op.window != 0 && end > op.window ? end - op.window : 0, end,
                op.sinks != 0 ? sinks[uint64_t{lane} * model_.heads + head] : -__builtin_inff()};
        }
        compute_.attend(queries, static_cast<int>(some),
                        {memory_.keys_of(slot, op.layer, kv), memory_.values_of(slot, op.layer, kv),
                         d, model_.attention_scale, padded(model_.context)},
                        scores_.get());
    }
    return block_.await_rank(publish());
}

// Computes a work item's features, 16 values of the MLP's hidden vector. products: its 16 rows of
// the gate, then those of "up". lane: finds the biases; for experts it counts the lanes of all
// experts before, too.
void Pass::activate(const KcclEngineOp& op, uint64_t lane, uint32_t work_item,
                    const float* products, float* activated) const {
    const uint32_t first = work_item * kRows, num = std::min(model_.ffn - first, uint32_t{kRows});
    alignas(64) float gate[2 * kRows];
    float* const up = gate + kRows;
    std::copy_n(products, 2 * kRows, gate);
    if (op.bias != 0) {
        const auto* bias = reinterpret_cast<const float*>(op.bias) + lane * 2 * model_.ffn;
        compute_.add_scaled(gate, bias + first, 1.0f, num);
        compute_.add_scaled(up, bias + model_.ffn + first, 1.0f, num);
    }
    if (model_.swiglu_limit == 0.0f) return compute_.swiglu(gate, up, kRows, activated + first);
    compute_.swiglu_limited(gate, up, model_.swiglu_limit, kRows, activated + first);
}

bool Pass::swiglu(const KcclEngineOp& op) {
    if (!norm_columns(reinterpret_cast<const float*>(op.norm))) return false;
    multiply(op, normed_columns(), num_,
             [&](uint32_t lane, uint32_t work_item, uint32_t column, uint32_t columns,
                 const float* products) {
                 for (uint32_t c = 0; c < columns; ++c) {
                     activate(op, lane, work_item, products + c * kPanels * kRows,
                              memory_.activated.get() +
                                  (uint64_t{lane} * kColumns + column + c) * memory_.ffn_stride);
                 }
             });
    return block_.await_rank(publish());
}

// Adds a module's output to residual i of a column. messages[lane]: what the lane's module has
// sent, from the first column on.
template <class Element>
void Pass::add_outputs(const KcclEngineOp& op, const Element* const* messages, uint32_t i,
                       uint32_t column) {
    const uint64_t stride = memory_.hidden_stride;
    const bool is_blocking = op.rule.is_blocking != 0;
    float* x = residual(i, column);
    if (!is_blocking) {
        const float* own = memory_.own.get() + (uint64_t{i} * kColumns + column) * stride;
        compute_.add_scaled(x, own, op.rule.own_scale, model_.hidden);
        if (op.rule.receives < 0) return;
    }
    const Element* arrays[kKcclEngineMaxLanes + 1];
    int num = 0;
    for (uint32_t lane = 0; lane < model_.num_lanes; ++lane) {
        if (!is_blocking && lane == first_lane_ + i) continue;
        arrays[num++] = messages[lane] + column * stride;
    }
    // Models that round messages have no biases, so only messages in FP32 need them.
    if constexpr (std::is_same_v<Element, float>) {
        if (op.bias != 0) {
            arrays[num++] =
                has_experts(op) ? expert_bias(op, column) : reinterpret_cast<const float*>(op.bias);
        }
    }
    if (num != 0) add_sum(x, arrays, num);
}

// Runs a module's last product, sends its messages, and computes the residual after it: program.py
// has the rule. Returns false if a wait failed.
template <class Element>
bool Pass::exchange(const KcclEngineOp& op) {
    const bool is_attention = op.kind == kKcclEngineOut;
    const float* in = (is_attention ? memory_.attended : memory_.activated).get();
    const uint64_t in_stride = is_attention ? memory_.attended_stride : memory_.ffn_stride;
    const uint32_t slot = op.module % num_slots(model_);
    const bool has_message = op.rule.sends != 0 || op.rule.is_blocking != 0;
    multiply(op, {in, kColumns * in_stride, in_stride}, num_,
             [&](uint32_t lane, uint32_t work_item, uint32_t column, uint32_t columns,
                 const float* products) {
                 const uint64_t at = (uint64_t{lane} * kColumns + column) * memory_.hidden_stride;
                 float* own = memory_.own.get() + at + work_item * kRows;
                 Element* to =
                     own_in_window<Element>(at_.messages, slot, lane, column) + work_item * kRows;
                 for (uint32_t c = 0; c < columns; ++c, own += memory_.hidden_stride) {
                     const float* from = products + c * kPanels * kRows;
                     std::copy_n(from, kRows, own);
                     if (!has_message) continue;
                     write_message(from, to);
                     to += memory_.hidden_stride;
                 }
             });
    return add_messages<Element>(op);
}

// Publishes a module's messages, waits for those that it receives, and computes the residual after
// the module. Returns false if a wait failed.
template <class Element>
bool Pass::add_messages(const KcclEngineOp& op) {
    const uint32_t module = op.module, slots = num_slots(model_);
    const uint32_t step = steps_of_modules_[module] = publish();
    if (!(op.rule.is_blocking != 0 ? block_.await_all(step) : block_.await_rank(step)))
        return false;
    if (op.rule.receives >= 0 && !block_.await_all(steps_of_modules_[op.rule.receives]))
        return false;
    const uint32_t from =
        op.rule.is_blocking != 0 ? module : static_cast<uint32_t>(op.rule.receives);
    const Element* messages[kKcclEngineMaxLanes];
    for (uint32_t lane = 0; lane < model_.num_lanes; ++lane) {
        messages[lane] = in_window<Element>(at_.messages, from % slots, lane, 0);
    }
    // The residuals of a column come one after another, because they take the same messages.
    const Share share = own_columns();
    for (uint32_t c = 0; c < num_; ++c) {
        for (uint32_t i = c; i < share.end; i += num_) {
            if (i >= share.first) add_outputs(op, messages, i / num_, c);
        }
    }
    return true;
}

}  // namespace kccl::engine
