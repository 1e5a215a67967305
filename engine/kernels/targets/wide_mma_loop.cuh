// wide_mma.cuh without a matrix unit, for the simulator. What a thread starts is only computed when
// it waits for it, or when very much is started. So a step that is overwritten before, and sums
// that are read before, are seen.
#pragma once

namespace kccl::decode {

template <class T, uint32_t VECTORS>
class WideMma {
    using Unit = Mma<T>;

  public:
    // Tests put AMD's Mma into the simulator, which takes more vectors. AMD has no such unit.
    static constexpr bool kIsThere = Unit::kVectors == kWideVectors;
    static constexpr uint32_t kWarps = 4;
    static constexpr uint32_t kStepBytes = VECTORS / kWideVectors * kWideGroupBytes;

    using Weights = typename Unit::Weights;
    struct Sums {
        typename Unit::Sums of[VECTORS / kWideVectors];
    };

    KCCL_DECODE void begin() const {}

    KCCL_DECODE void multiply(Sums& sums, const Weights& weights, const uint8_t* step,
                              bool adds = true) {
        if (num_ == kMost) compute_next();
        started_[(first_ + num_++) % kMost] = {&sums, weights, step, adds, group_};
    }

    KCCL_DECODE void commit() { ++group_; }

    template <uint32_t PENDING>
    KCCL_DECODE void wait() {
        while (num_ > 0 && started_[first_].group + PENDING < group_) compute_next();
    }
    KCCL_DECODE void wait(Sums&) { wait<0>(); }

  private:
    static constexpr uint32_t kMost = 32;

    struct Started {
        Sums* sums;
        Weights weights;
        const uint8_t* step;
        bool adds;
        uint32_t group;
    };

    KCCL_DECODE void compute_next() {
        const Started& next = started_[first_];
        first_ = (first_ + 1) % kMost;
        --num_;
        if (!next.adds) *next.sums = {};
        // Other threads have no row.
        if (warp().index() >= kTileRows) return;
        for (uint32_t group = 0; group < VECTORS / kWideVectors; ++group) {
            Unit::multiply(next.sums->of[group], next.weights,
                           inputs(next.step + group * kWideGroupBytes));
        }
    }

    // Loads four vectors' part of a step.
    KCCL_DECODE static typename Unit::Inputs inputs(const uint8_t* step) {
        typename Unit::Inputs inputs;
        for (uint32_t vector = 0; vector < kWideVectors; ++vector) {
            for (uint32_t pair = 0; pair < 2; ++pair) {
                float high[2 * kTileFloat4s], low[2 * kTileFloat4s];
                load(step, wide_word_at(vector, 0, false, pair), high);
                load(step, wide_word_at(vector, 0, true, pair), low);
                for (uint32_t i = 0; i < 2 * kTileFloat4s; ++i) {
                    inputs.value[vector][i / 2 * 4 + 2 * pair + i % 2] =
                        Parts<T>::kHigh * high[i] + Parts<T>::kLow * low[i];
                }
            }
        }
        return inputs;
    }

    // Loads the 16 bytes of a column.
    KCCL_DECODE static void load(const uint8_t* step, uint32_t word,
                                 float (&values)[2 * kTileFloat4s]) {
        const auto line =
            mem::load_plain(reinterpret_cast<const mem::Line*>(step + word * sizeof(uint32_t)));
        for (uint32_t i = 0; i < 2; ++i) Unit::widen(line.word[i], values + 4 * i);
    }

    Started started_[kMost];
    uint32_t first_ = 0;
    uint32_t num_ = 0;
    uint32_t group_ = 0;
};

}  // namespace kccl::decode
