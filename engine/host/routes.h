// Chooses the experts that the positions (columns) of a run pass. Every block makes the same choice
// from the same bits.
#pragma once

#include "memory.h"

namespace kccl::engine {

// A position's way through one of the experts that are chosen for it.
struct Passage {
    uint32_t column;  // the position's number in the run
    uint32_t place;   // the expert's number among the column's chosen ones, which ascend
    float weight;     // the factor of the expert's output
};

// All passages of a run through one expert.
struct Passages {
    uint32_t expert;
    uint32_t num;
    const Passage* first;  // `num` of them, in ascending order of columns
};

class Routes {
  public:
    explicit Routes(const KcclEngineModel& model)
        : num_experts_(model.num_experts),
          num_chosen_(model.num_chosen),
          normalises_(model.normalises_choice != 0),
          logits_(zeros(padded(num_experts_))),
          chosen_(zeros<Passage>(kColumns, num_chosen_)),
          experts_(zeros<uint32_t>(kColumns, num_chosen_)),
          passages_(zeros<Passage>(kColumns, num_chosen_)),
          groups_(zeros<Passages>(num_experts_)) {}

    bool is_complete() const { return logits_ && chosen_ && experts_ && passages_ && groups_; }

    // Chooses the experts of a column. logits: float [num_experts], the router's output. bias:
    // float [num_experts], added to the logits, or null.
    void choose(uint32_t column, const float* logits, const float* bias, const Compute& compute);

    // Groups the passages of columns 0 to num - 1 by expert. choose() must have been called for all
    // of these columns.
    void group(uint32_t num);

    // num_groups() returns how many experts at least one column has chosen. [i] returns the
    // passages of the i-th of these experts, in ascending order.
    uint32_t num_groups() const { return num_groups_; }
    const Passages& operator[](uint32_t i) const { return groups_[i]; }

    // Calls use(expert, weight) for the experts of a column in ascending order.
    template <class Use>
    void each_of(uint32_t column, Use use) const {
        for (uint32_t i = column * num_chosen_; i < (column + 1) * num_chosen_; ++i) {
            use(experts_[i], chosen_[i].weight);
        }
    }

  private:
    const uint32_t num_experts_, num_chosen_;
    const bool normalises_;
    const Floats logits_;            // [expert]
    const Array<Passage> chosen_;    // [column][place]
    const Array<uint32_t> experts_;  // [column][place]
    const Array<Passage> passages_;  // group by group
    const Array<Passages> groups_;   // one for each expert that is chosen
    uint32_t num_groups_ = 0;
};

}  // namespace kccl::engine
