// mma.cuh as AMD's matrix units compute it, on a CPU: in the simulator it takes the place of
// targets/mma_loop.cuh. Tiles are packed as targets/mma_hip.cuh packs them. Thread r < 16
// computes row r. The high and the low part of a vector are two columns, with a sum each.
#pragma once

#include "matrix.h"

namespace kccl::decode {

template <class T>
struct Mma {
    static constexpr uint32_t kVectors = 8;

    // 16 bits each.
    struct Weights {
        bool is_there;
        uint64_t quad[kTileFloat4s];
    };
    struct Inputs {
        uint32_t num_vectors;
        uint64_t high[kVectors][kTileFloat4s];
        uint64_t low[kVectors][kTileFloat4s];
    };
    struct Sums {
        float high[kVectors];
        float low[kVectors];
    };

    KCCL_CONSTEXPR static uint32_t offset(uint32_t row, uint32_t column) {
        return (column / 4 * 16 + row) * 8 + column % 4 * 2;
    }
    KCCL_CONSTEXPR static uint32_t key_row(uint32_t position) { return position; }
    KCCL_CONSTEXPR static uint32_t position_of(uint32_t key_row) { return key_row; }

    // Converts four elements. Only attention of warps of 32 calls this.
    KCCL_DEVICE static void widen(uint64_t four, float* out) {
        for (uint32_t i = 0; i < 4; ++i) {
            out[i] = Element<T>::widen(T{static_cast<uint16_t>(four >> 16 * i)});
        }
    }

    class Lane {
      public:
        KCCL_DEVICE Lane(uint32_t num_vectors, uint32_t stride)
            : row_(warp().index() < kTileRows ? warp().index() : kTileRows),
              num_vectors_(num_vectors),
              stride_(stride) {}

        KCCL_DEVICE Weights weights(const uint8_t* tile) const {
            Weights weights = {};
            weights.is_there = row_ < kTileRows;
            for (uint32_t i = 0; weights.is_there && i < kTileFloat4s; ++i) {
                const uint8_t* const quad = tile + offset(row_, 4 * i);
                weights.quad[i] = mem::load_plain(reinterpret_cast<const uint64_t*>(quad));
            }
            return weights;
        }

        KCCL_DEVICE Weights streamed(const uint8_t* tile) const { return weights(tile); }

        KCCL_DEVICE Inputs inputs(const StagedFloat4* staged) const {
            Inputs inputs = {};
            inputs.num_vectors = num_vectors_;
            for (uint32_t vector = 0; vector < num_vectors_; ++vector) {
                for (uint32_t i = 0; i < kTileFloat4s; ++i) {
                    const StagedFloat4* mine = staged + vector * stride_ + i;
                    inputs.high[vector][i] =
                        mem::load_plain(reinterpret_cast<const uint64_t*>(mine->high));
                    inputs.low[vector][i] =
                        mem::load_plain(reinterpret_cast<const uint64_t*>(mine->low));
                }
            }
            return inputs;
        }

        KCCL_DEVICE void scale(Sums& sums, const float* factors) const {
            for (uint32_t vector = 0; vector < num_vectors_; ++vector) {
                const float factor = mem::load_plain(factors + vector);
                sums.high[vector] *= factor;
                sums.low[vector] *= factor;
            }
        }

        template <class F>
        KCCL_DEVICE void totals(const Sums& sums, F f) const {
            for (uint32_t vector = 0; vector < num_vectors_; ++vector) {
                f(row_, vector, sums.high[vector] + sums.low[vector]);
            }
        }

      private:
        const uint32_t row_;
        const uint32_t num_vectors_;
        const uint32_t stride_;
    };

    KCCL_DEVICE static void multiply(Sums& sums, const Weights& weights, const Inputs& inputs) {
        if (!weights.is_there) return;
        for (uint32_t vector = 0; vector < inputs.num_vectors; ++vector) {
            add(sums.high + vector, weights.quad, inputs.high[vector]);
            add(sums.low + vector, weights.quad, inputs.low[vector]);
        }
    }

  private:
    static gcn::Factor factor(const uint64_t* quads, uint32_t column) {
        const auto bits = static_cast<uint16_t>(quads[column / 4] >> 16 * (column % 4));
        return gcn::factor_of(Element<T>::widen(T{bits}),
                              kIsBfloat16<T> ? gcn::kLeastBfloat16 : gcn::kLeastHalf);
    }

    // The simulator need not see these accesses: they are the thread's own.
    __attribute__((noinline, no_sanitize("thread"))) static void add(float* sum,
                                                                     const uint64_t* weights,
                                                                     const uint64_t* inputs) {
        constexpr uint32_t kAtOnce = gcn::kProductsAtOnce;
        for (uint32_t first = 0; first < kTileColumns; first += kAtOnce) {
            gcn::Factor a[kAtOnce], b[kAtOnce];
            for (uint32_t i = 0; i < kAtOnce; ++i) {
                a[i] = factor(weights, first + i);
                b[i] = factor(inputs, first + i);
            }
            *sum = gcn::fused_sum(a, b, *sum);
        }
    }
};

}  // namespace kccl::decode
